"""Joins that are forked, because starting Python a hundred times takes longer than a test may.

`python -m tests.warehouse.forked_joins TABLE LOGGED EVENTS`: for each line, a time, a child that joins what is there at
that time; its process id is the answer, and "ended" when it has. Nothing that cannot be forked runs in the parent.
"""

from __future__ import annotations

import os
import sys

import deltalake  # noqa: F401 (loaded before the fork)
import duckdb  # noqa: F401
import numpy as np
import pyarrow as pa
import pyarrow.parquet

import penstock as ps
import penstock.warehouse.duckdb_join
from penstock.warehouse.joining import join_logs


def main() -> None:
    np.asarray(pa.array([1]))  # loads pandas, which takes longer than a join
    table = ps.Table(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                join_logs(table, sys.argv[2], sys.argv[3], now_s=int(line))
            finally:
                os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
