"""`penstock`: reads the arguments, then imports what the command needs.

Exit codes: 0 all went well, 1 it did not (the message says why), 2 the command line was wrong. An exception of the
user's own code is shown as Python shows it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from penstock.cli.service_arguments import add_service_commands
from penstock.cli.table_arguments import add_table_commands
from penstock.core.errors import PenstockError


class UsageError(Exception):
    """The command line asks for something that is not there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except UsageError as error:
        print(f"penstock {options.command}: {error}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"penstock {options.command}: interrupted", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="Input pipelines for machine learning.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="show what Penstock does, on data made on the spot",
        description="Make some data, read it here and through a service, break things on purpose, and check that "
        "nothing is lost. Takes under a minute, and leaves nothing behind.",
    )
    demo.add_argument("--keep", action="store_true", help="leave the demo's files where they are, to look at them")

    replay = commands.add_parser(
        "replay",
        help="run an element that was skipped through its function again",
        description="Without ID: list the elements in a quarantine file. With ID: run that element again, in this "
        "thread, so that breakpoint() works; if it fails, look at the failure in a debugger. This loads the functions "
        "stored in the file: replay only files whose origin you trust.",
    )
    replay.add_argument("file", metavar="FILE", help="what on_error=SkipErrors(quarantine=FILE) wrote")
    replay.add_argument("id", metavar="ID", nargs="?", help="an id from the list; its first characters are enough")
    replay.add_argument(
        "--function", metavar="MODULE:NAME", help="call this instead of the stored function, to try a fix"
    )
    replay.add_argument(
        "--debugger",
        choices=["auto", "pdb", "none"],
        default="auto",
        help="what to do when it fails: auto (default) is the debugger that breakpoint() would use, on a terminal only",
    )

    explain = commands.add_parser(
        "explain",
        help="print the plan of a pipeline",
        description="Print a pipeline as it was written and as it will run. The module that has it is imported.",
    )
    explain.add_argument(
        "dataset", metavar="MODULE:DATASET", help="a Dataset, or a function that returns one; MODULE may be a .py file"
    )
    explain.add_argument(
        "--analyze",
        action="store_true",
        help="run it here for a while and say what limits it; of a loader, what stands before distribute()",
    )
    explain.add_argument("--seconds", type=_seconds, default=2.0, help="how long to run it (default: 2)")
    explain.add_argument("--mermaid", action="store_true", help="print a Mermaid flowchart")

    session = commands.add_parser(
        "session",
        help="run or explain a session over a feature table",
        description="A session is a TOML or JSON file that names a feature table, features, transforms and a label. "
        "Nothing of it is code.",
    )
    actions = session.add_subparsers(dest="action", metavar="action", required=True)
    runs = actions.add_parser(
        "run",
        help="read its batches, and say how fast they came",
        description="Read the batches of a session, here or with workers, and say how many rows came how fast. The "
        "table's version is printed first: with version = N in the file the same rows are read again later.",
    )
    runs.add_argument("file", metavar="FILE", help="the session, in TOML or JSON")
    runs.add_argument("--batches", type=int, metavar="N", help="stop after so many batches (default: at the end)")
    runs.add_argument(
        "--idle",
        type=_seconds,
        metavar="SECONDS",
        help="of a session that follows its table: end when nothing was committed for so long (default: never)",
    )
    to = runs.add_mutually_exclusive_group()
    to.add_argument("--workers", type=int, metavar="N", help="worker processes on this host (default: read here)")
    to.add_argument("--service", metavar="ADDRESS", help="the service that reads it: its address or its file")
    explains = actions.add_parser(
        "explain",
        help="print what it reads, makes, gives and leaves out, and its plan",
        description="Print which features a session reads, makes and gives, which are dead, and its plan.",
    )
    explains.add_argument("file", metavar="FILE", help="the session, in TOML or JSON")

    commands.add_parser(
        "doctor",
        help="print versions, extras, cores and memory as Penstock sees them",
        description="Print versions, extras, cores and memory as Penstock sees them. The exit code is 1 if something "
        "that is needed is missing.",
    )
    _add_cache_command(commands)
    add_service_commands(commands)
    add_table_commands(commands)
    return parser


def _add_cache_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cache = commands.add_parser(
        "cache",
        help="list, pin, check or remove what autocache() keeps",
        description="What autocache() keeps on this host, or at a location. PREFIX is the name of a pipeline's "
        "beginning, as `penstock cache ls` prints it; its first characters are enough.",
    )
    cache.add_argument("action", choices=["ls", "why", "pin", "unpin", "rm", "verify"])
    cache.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="of what; empty: of everything")
    cache.add_argument("--location", default=None, help="a folder or URL (default: this user's folder on this host)")
    cache.add_argument(
        "--scope", default="user", help="whose entries: `user` (default), or `principal NAME` of a service"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and a day")
    return seconds


def _version() -> str:
    from penstock import __version__

    return f"penstock {__version__}"


def _demo(options: argparse.Namespace) -> int:
    from penstock.cli.demo import run_demo

    return run_demo(keep=options.keep)


def _replay(options: argparse.Namespace) -> int:
    from penstock.cli.replay import list_skipped, run_again

    if options.id is None:
        return list_skipped(options.file)
    return run_again(options.file, options.id, function=options.function, debugger=options.debugger)


def _explain(options: argparse.Namespace) -> int:
    from penstock.cli.explain import print_plan

    return print_plan(options.dataset, analyze=options.analyze, mermaid=options.mermaid, seconds=options.seconds)


def _session(options: argparse.Namespace) -> int:
    from penstock.cli.session import explain_session, run_session

    if options.action == "explain":
        return explain_session(options.file)
    return run_session(
        options.file, batches=options.batches, to=options.workers or options.service, idle_s=options.idle
    )


def _doctor(options: argparse.Namespace) -> int:
    from penstock.cli.doctor import print_report

    return print_report()


def _cache(options: argparse.Namespace) -> int:
    from penstock.cli.cache import run_cache

    return run_cache(options)


def _serve(options: argparse.Namespace) -> int:
    from penstock.cli.serve import run_serve

    return run_serve(options)


def _dispatcher(options: argparse.Namespace) -> int:
    from penstock.cli.dispatcher import run_dispatcher

    return run_dispatcher(options)


def _worker(options: argparse.Namespace) -> int:
    from penstock.cli.worker import run_worker

    return run_worker(options)


def _jobs(options: argparse.Namespace) -> int:
    from penstock.cli.jobs import run_jobs
    from penstock.cli.scaling import run_cost, run_why

    if options.action == "why":
        return run_why(options.service, options.job)
    if options.action == "cost":
        return run_cost(options)
    return run_jobs(options.service, options.action, options.job)


def _scale(options: argparse.Namespace) -> int:
    from penstock.cli.scaling import run_scale

    return run_scale(options.service, options.job, options.workers)


def _provision(options: argparse.Namespace) -> int:
    from penstock.cli.provision import run_provision

    return run_provision(options)


def _drain(options: argparse.Namespace) -> int:
    from penstock.cli.jobs import run_drain

    return run_drain(options.service, options.worker)


def _keys(options: argparse.Namespace) -> int:
    from penstock.cli.keys import run_keys

    return run_keys(options)


def _table(options: argparse.Namespace) -> int:
    from penstock.cli.table import run_table

    return run_table(options)


_COMMANDS = {
    "demo": _demo,
    "replay": _replay,
    "explain": _explain,
    "session": _session,
    "doctor": _doctor,
    "cache": _cache,
    "serve": _serve,
    "dispatcher": _dispatcher,
    "worker": _worker,
    "jobs": _jobs,
    "scale": _scale,
    "provision": _provision,
    "drain": _drain,
    "keys": _keys,
    "table": _table,
}
