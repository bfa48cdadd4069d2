"""`penstock table`: feature tables from the command line."""

from __future__ import annotations

import argparse
import base64
import secrets
from collections.abc import Callable

from penstock.cli.loading import load_object
from penstock.cli.main import UsageError
from penstock.core.private_files import open_private
from penstock.sources.table_keys import KEY_BYTES
from penstock.warehouse.features import Feature
from penstock.warehouse.read_log import ReadLog, popular_share
from penstock.warehouse.table import Table
from penstock.warehouse.writing import StripeSize


def run_table(options: argparse.Namespace) -> int:
    """Run one action and print what became of it."""
    if options.action == "key":
        return _make_key(options.file)
    actions: dict[str, Callable[[Table, argparse.Namespace], str]] = {
        "show": _show,
        "generate": _generate,
        "join": _join,
        "reorder": _reorder,
        "compact": _compact,
        "tier": _tier,
        "derive": _derive,
        "retain": _retain,
        "reap": _reap,
        "vacuum": _vacuum,
    }
    print(actions[options.action](Table(options.table, key=options.key), options))
    return 0


def _make_key(path: str) -> int:
    try:
        with open_private(path, "x") as file:
            file.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n")
    except FileExistsError:
        raise UsageError(f"{path} exists already; a key in use is not overwritten") from None
    print(f"{path}  the key: without it, what is encrypted with it is lost")
    return 0


def _show(table: Table, options: argparse.Namespace) -> str:
    snapshot = table.snapshot()
    features = table.features.values()
    kinds = ", ".join(f"{sum(f.kind == kind for f in features)} {kind}" for kind in ("dense", "sparse", "scored"))
    days = snapshot.partitions
    size = sum(file.size for file in snapshot.files)
    rows = sum(max(0, file.rows) for file in snapshot.files)
    lines = [
        f"version   {snapshot.version}",
        f"days      {len(days)}" + (f": {days[0]} to {days[-1]}" if days else ""),
        f"files     {len(snapshot.files)}, {size / 1e6:,.1f} MB, {rows:,} rows",
        f"features  {kinds}",
        f"sessions  {len(ReadLog(table.own_folder).read())} in the read log",
    ]
    if options.features:
        lines += [f"{f.column:>8}  {f.kind:6}  {f.lifecycle:12}  {f.name}  {f.owner}".rstrip() for f in features]
    return "\n".join(lines)


def _generate(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.generating import generate

    made = generate(
        options.table,
        like=options.like,
        scale=options.scale,
        rows=options.rows,
        partitions=options.days,
        sessions=options.sessions,
        seed=options.seed,
    )
    return _show(made, argparse.Namespace(features=False))


def _join(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.joining import JoinEngine, JoinRules, join_logs

    rules = JoinRules(window_s=options.window, keep_negatives=options.keep_negatives)
    engine: JoinEngine | None = None
    if options.spark is not None:
        from penstock.warehouse.spark_join import SparkJoin

        engine = SparkJoin(options.spark)
    count = join_logs(table, options.logged, options.events, now_s=options.now, rules=rules, engine=engine)
    return f"{count} rows appended; the table is at version {table.version}"


def _reorder(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.layout import reorder

    stripe = None
    if options.stripe_rows is not None or options.stripe_mib is not None:
        known = table.stripe
        size = known.bytes if options.stripe_mib is None else int(options.stripe_mib * (1 << 20))
        stripe = StripeSize(rows=options.stripe_rows or known.rows, bytes=size)
    return f"version {reorder(table, stripe=stripe)}: features that are read together stand side by side"


def _compact(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.layout import compact

    before = len(table.snapshot().files)
    compact(table, small_bytes=int(options.small_mib * (1 << 20)))
    return f"{before} files have become {len(table.snapshot().files)}"


def _tier(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.column_sizes import column_bytes
    from penstock.warehouse.layout import tier

    reads = ReadLog(table.own_folder).read()
    if not reads:
        raise UsageError(f"{table.url} has no read log to choose columns by")
    features, share = popular_share(reads, column_bytes(table), options.traffic)
    size = tier(table, options.to, features)
    return f"{len(features)} features, {share:.0%} of the bytes, in {options.to}: {size / 1e6:,.1f} MB"


def _derive(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.lifecycle import derive

    into: dict[str, Feature] = {}
    for text in options.into:
        key, mark, rest = text.partition("=")
        number, _, kind = rest.partition(":")
        if not mark or not number.isdigit():
            raise UsageError(f"--into {text}: write it as KEY=ID:KIND, say mean=901:dense")
        into[key] = Feature(id=int(number), name=key, kind=kind or "dense")
    version = derive(table, load_object(options.pipeline), into, features=options.features)
    return f"version {version} has {', '.join(f.column for f in into.values())}"


def _retain(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.lifecycle import retain

    dropped = retain(table, options.days)
    return f"{len(dropped)} days let go" + (f": {dropped[0]} to {dropped[-1]}" if dropped else "")


def _reap(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.lifecycle import reap, vacuum

    reap(table, options.features)
    removed = vacuum(table)
    return f"{len(options.features)} features are in no file of version {table.version}; {len(removed)} files removed"


def _vacuum(table: Table, options: argparse.Namespace) -> str:
    from penstock.warehouse.lifecycle import vacuum

    return f"{len(vacuum(table))} files removed"
