"""A process that appends to a table, over and over: `python -m tests.warehouse.appender FOLDER NAME FIRST COUNT`."""

from __future__ import annotations

import sys

import penstock as ps
from tests.warehouse.tables import DAYS, some_rows


def main() -> None:
    folder, name, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    table = ps.Table(folder)
    begun = table.snapshot().progress.get(name, -1) + 1
    print("ready", flush=True)
    for number in range(begun, count):
        table.append(some_rows(5, first_key=first + number * 5), date=DAYS[number % 3], progress=(name, number))
        print(number, flush=True)


if __name__ == "__main__":
    main()
