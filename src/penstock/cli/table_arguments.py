"""The arguments of `penstock table`."""

from __future__ import annotations

import argparse
from typing import Any


def add_table_commands(commands: Any) -> None:
    """Add `table` and what it does."""
    table = commands.add_parser(
        "table",
        help="feature tables: make, look at, lay out and clean up",
        description="Feature tables: Parquet files under a Delta log. TABLE is a folder.",
    )
    actions = table.add_subparsers(dest="action", metavar="action", required=True)

    show = _action(actions, "show", "print version, days, files, features and how they are read")
    show.add_argument("--features", action="store_true", help="list the features")

    generate = _action(actions, "generate", "make a table with the statistics of a published model, and its read log")
    generate.add_argument("--like", choices=["rm1", "rm2", "rm3"], required=True, help="which model")
    generate.add_argument("--scale", type=float, default=0.01, help="the share of its features (default: 0.01)")
    generate.add_argument("--rows", type=int, default=2048, help="rows of a day (default: 2048)")
    generate.add_argument("--days", type=int, help="how many days (default: as many as the model stores)")
    generate.add_argument("--sessions", type=int, default=64, help="sessions in the read log (default: 64)")
    generate.add_argument("--seed", type=int, default=0, help="the same seed makes the same table (default: 0)")

    join = _action(actions, "join", "join logged features and events, label them, and append the rows")
    join.add_argument("--logged", required=True, metavar="GLOB", help="Parquet files: key, time, dense, sparse, scored")
    join.add_argument("--events", required=True, metavar="GLOB", help="Parquet files: key, time")
    join.add_argument("--now", type=int, required=True, metavar="SECONDS", help="up to when events are there")
    join.add_argument(
        "--window", type=int, default=3600, metavar="SECONDS", help="how long a row waits (default: 3600)"
    )
    join.add_argument("--spark", metavar="MASTER", help="join on Spark, on that master, and not on DuckDB here")
    join.add_argument("--keep-negatives", type=float, default=1.0, help="share of the rows without an event that stay")

    reorder = _action(
        actions, "reorder", "write files again with features side by side that are read together, by the read log"
    )
    _add_stripe(reorder)
    compact = _action(actions, "compact", "write the small files of each day as one")
    compact.add_argument("--small-mib", type=float, default=128, help="what is small (default: 128)")

    tier = _action(actions, "tier", "copy popular columns to a faster folder, which readers then use")
    tier.add_argument("--to", required=True, metavar="FOLDER", help="where the copies are")
    tier.add_argument("--traffic", type=float, default=0.8, help="the share of the traffic to serve (default: 0.8)")

    derive = _action(actions, "derive", "store what a pipeline makes as features")
    derive.add_argument(
        "--pipeline", required=True, metavar="MODULE:FUNCTION", help="takes a Dataset of the table, returns another"
    )
    derive.add_argument(
        "--into",
        required=True,
        action="append",
        metavar="KEY=ID:KIND",
        help="which result is which feature; repeatable",
    )
    derive.add_argument("--features", type=_ids, help="what the pipeline reads, as 1,2,3 (default: all)")

    retain = _action(actions, "retain", "let go of old days")
    retain.add_argument("--days", type=int, required=True, help="how many are kept, counted from the newest")
    reap = _action(actions, "reap", "write files again without some features, and remove what had them")
    reap.add_argument("--features", type=_ids, required=True, help="as 1,2,3")
    _action(actions, "vacuum", "remove files that neither the newest version nor a session's has")

    key = actions.add_parser("key", help="make a key for encrypted tables", description="Write a new key to a file.")
    key.add_argument("file", metavar="FILE", help="where; only its owner may read it")


def _action(actions: Any, name: str, told: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=told, description=told[0].upper() + told[1:] + ".")
    action.add_argument("table", metavar="TABLE", help="the table's folder")
    action.add_argument("--key", metavar="file:PATH|command:COMMAND", help="where the key of an encrypted table is")
    return action


def _add_stripe(action: argparse.ArgumentParser) -> None:
    action.add_argument("--stripe-rows", type=int, help="rows of a stripe, from now on")
    action.add_argument("--stripe-mib", type=float, help="memory of a stripe, from now on")


def _ids(text: str) -> list[int]:
    """
    >>> _ids("1,2,30")
    [1, 2, 30]
    """
    return [int(part) for part in text.split(",") if part]
