"""Writers that are forked, because starting Python fifty times takes longer than a test may.

`python -m tests.warehouse.forked_writers FOLDER`: for each line that comes, a child that appends from there on; its
process id is the answer. Nothing that cannot be forked (deltalake's threads) runs in the parent.
"""

from __future__ import annotations

import os
import sys

import deltalake  # noqa: F401 (loaded before the fork)

import penstock as ps
from tests.warehouse.tables import some_rows


def main() -> None:
    table = ps.Table(sys.argv[1])
    some_rows(5)
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                for number in range(int(line), int(line) + 1000):
                    os.write(write, b".")
                    table.append(some_rows(5, first_key=number * 5), date="2026-01-30", progress=("w", number))
            finally:
                os._exit(1)
        os.close(write)
        os.read(read, 1)
        os.close(read)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
