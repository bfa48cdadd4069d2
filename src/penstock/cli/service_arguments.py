"""The arguments of the commands that run a service or talk to one. Imports nothing that a `--help` does not need."""

from __future__ import annotations

import argparse
import re
from typing import Any

from penstock.core.checks import MOST_PROCESSES

DEFAULT_PORT = 5050

SERVICE_HELP = "the service: tcp://host:port or a service file (default: $PENSTOCK_SERVICE)"
ROLES_OF_KEYS = ("trainer", "agent", "operator", "provisioner")
ENGINES = ("slurm", "ray", "kubernetes")
KEYS_HELP = "the service's own keys, made by `penstock keys`; needed to listen by TCP"


def add_service_commands(commands: Any) -> None:
    """Add them to the subparsers of `penstock`."""
    serve = commands.add_parser(
        "serve",
        help="run a dispatcher and workers on this host",
        description="Run a dispatcher and workers on this host, until Ctrl-C or SIGTERM. What dies is started again.",
    )
    serve.add_argument(
        "--workers",
        type=_worker_range,
        default="auto",
        metavar="N|LEAST-MOST|auto",
        help="so many, or as many as jobs want between two numbers (default: auto, from 1 to one a core)",
    )
    serve.add_argument(
        "--on", choices=ENGINES[:2], metavar="slurm|ray", help="run the workers there (default: on this host)"
    )
    _add_listening(serve)
    _add_dispatching(serve)
    _add_resources(serve)
    _add_engines(serve)

    dispatcher = commands.add_parser(
        "dispatcher",
        help="run a dispatcher; workers of any host join it",
        description="Run a dispatcher in the foreground, until Ctrl-C or SIGTERM. Started again with the same "
        "--journal it goes on where it was; workers and trainers wait for it meanwhile.",
    )
    _add_listening(dispatcher)
    _add_dispatching(dispatcher)

    worker = commands.add_parser(
        "worker",
        help="run workers on this host for a dispatcher anywhere",
        description="Run workers on this host. On SIGTERM or Ctrl-C they leave in peace: their work is taken over by "
        "others first. A second signal ends them at once.",
    )
    worker.add_argument(
        "--dispatcher",
        metavar="ADDRESS|FILE",
        help="tcp://host:port, or a service file (default: $PENSTOCK_SERVICE)",
    )
    worker.add_argument("--processes", type=_count, default="auto", metavar="N", help="default: one a core (auto)")
    worker.add_argument(
        "--bind", metavar="HOST", help="where to listen (default: this host only if the dispatcher is here)"
    )
    worker.add_argument("--advertise", metavar="HOST", help="the name or address others reach this host by")
    worker.add_argument("--port-range", type=_port_range, metavar="A-B", help="listen at ports of this range only")
    worker.add_argument("--keys", metavar="FILE", help="the key of an agent, made by `penstock keys`")
    worker.add_argument(
        "--name", type=_name, metavar="NAME", help="call the worker NAME, or several NAME.0, NAME.1, ... (default: any)"
    )
    worker.add_argument(
        "--with-parent", action="store_true", help="leave when the process that started this has ended, too"
    )
    worker.add_argument(
        "--drain-seconds", type=_positive, default=30.0, metavar="S", help="how long leaving may take (default: 30)"
    )
    _add_resources(worker)

    provision = commands.add_parser(
        "provision",
        help="bring workers on Slurm, Ray or Kubernetes, as many as a service wants",
        description="Ask a service how many workers it wants, and have an engine run them, until Ctrl-C or SIGTERM, "
        "which releases them. What one that was killed had started goes on, and is found again by the next.",
    )
    provision.add_argument("engine", choices=ENGINES, metavar="|".join(ENGINES))
    provision.add_argument("--service", metavar="SERVICE", help=SERVICE_HELP)
    provision.add_argument("--keys", metavar="FILE", help="the key of a provisioner, made by `penstock keys`")
    provision.add_argument("--agent-keys", metavar="FILE", help="the key that the workers show (Slurm, Ray)")
    provision.add_argument(
        "--workers", type=_worker_range, required=True, metavar="LEAST-MOST", help="how many at least and at most"
    )
    provision.add_argument("--tags", type=_tags, default=(), metavar="A,B", help="what jobs may ask for with requires=")
    _add_engines(provision)

    jobs = commands.add_parser(
        "jobs",
        help="list the jobs and workers of a service; cancel, pause or resume a job; why it has its workers, its cost",
        description="Without ACTION: list the jobs and the workers. why JOB tells each decision about its workers, "
        "with the numbers it rests on. cost tells what jobs have cost so far, by a file of prices.",
    )
    actions = ["cancel", "pause", "resume", "why", "cost"]
    jobs.add_argument("action", nargs="?", choices=actions, metavar="|".join(actions))
    jobs.add_argument("job", nargs="?", metavar="JOB")
    jobs.add_argument("--prices", metavar="FILE", help="for cost: TOML, for each machine per_h, source and date")
    jobs.add_argument("--worker", default="worker", metavar="KIND", help="the machine a worker is (default: worker)")
    jobs.add_argument("--trainer", default="trainer", metavar="KIND", help="that of a rank (default: trainer)")
    jobs.add_argument("--service", metavar="SERVICE", help=SERVICE_HELP)

    scale = commands.add_parser(
        "scale",
        help="say how many workers a job has from now on",
        description="Have a job keep so many workers: a number, auto (as many as its trainer needs), LEAST-MOST (auto, "
        "within these), or own (what the job itself asked for).",
    )
    scale.add_argument("job", metavar="JOB")
    scale.add_argument("workers", type=_workers_asked, metavar="N|auto|LEAST-MOST|own")
    scale.add_argument("--service", metavar="SERVICE", help=SERVICE_HELP)

    drain = commands.add_parser(
        "drain",
        help="let a worker finish: it takes no new work and hands over what it has",
        description="Have a worker take no new work and hand over what it has. Trainers notice nothing; its place is "
        "free once others have taken over.",
    )
    drain.add_argument("worker", metavar="WORKER", help="its id, as `penstock jobs` prints it")
    drain.add_argument("--service", metavar="SERVICE", help=SERVICE_HELP)

    keys = commands.add_parser(
        "keys",
        help="make, list, rotate and revoke the keys of a service that listens by TCP",
        description="Keys are files. make DIR writes server.json, for the dispatcher, and a key for each role: "
        "agent.json for workers, trainer.json, operator.json; make DIR NAME writes one more. All are secret, and "
        "readable by you only. A dispatcher that was started with --keys DIR/server.json sees each change within a "
        "second.",
    )
    keys.add_argument("action", choices=["make", "list", "rotate", "revoke"], metavar="make|list|rotate|revoke")
    keys.add_argument("folder", metavar="DIR")
    keys.add_argument("name", nargs="?", metavar="NAME")
    keys.add_argument("--role", choices=ROLES_OF_KEYS, metavar="|".join(ROLES_OF_KEYS), help="(default: trainer)")
    keys.add_argument(
        "--key", metavar="BEGINNING", help="only the key that begins so, as `list` shows it: --key=BEGINNING"
    )
    keys.add_argument(
        "--keep-old-seconds",
        type=_positive,
        default=3600.0,
        metavar="S",
        help="how long a rotated key's predecessor stays valid (default: 3600)",
    )


def _add_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--id", metavar="ID", help="of who brings them; the same after a restart (default: made up)")
    parser.add_argument(
        "--price-per-hour", type=_price, default=0.0, metavar="P", help="of a worker: the cheapest are wanted first"
    )
    parser.add_argument(
        "--drain-seconds", type=_positive, default=30.0, metavar="S", help="how long leaving may take (default: 30)"
    )
    parser.add_argument("--cpus", type=_whole, default=1, metavar="N", help="Slurm, Ray: of each worker (default: 1)")
    parser.add_argument(
        "--time-limit-seconds", type=_positive, metavar="S", help="Slurm: of each worker; its end is a drain"
    )
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="Slurm: further options, as one word")
    parser.add_argument("--log", default="/dev/null", metavar="PATTERN", help="Slurm: where workers write, as --output")
    parser.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="Ray: the cluster (default: auto)")
    parser.add_argument("--deployment", default="penstock-worker", metavar="NAME", help="Kubernetes: of the workers")
    parser.add_argument("--namespace", default="default", metavar="NAME", help="Kubernetes: where it is")
    parser.add_argument("--pods", metavar="SELECTOR", help="Kubernetes: its pods (default: app=DEPLOYMENT)")
    parser.add_argument("--kubeconfig", metavar="FILE", help="Kubernetes: (default: the pod's account, or yours)")


def chosen_port(options: argparse.Namespace) -> int:
    if options.port is not None:
        return int(options.port)
    return 0 if options.port_range else DEFAULT_PORT


def _add_listening(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bind", metavar="HOST", help="listen by TCP here (default: at Unix sockets of this user's)")
    parser.add_argument("--advertise", metavar="HOST", help="the name or address others reach this host by")
    parser.add_argument("--port", type=_port, metavar="N", help=f"by TCP; 0: any free one (default: {DEFAULT_PORT})")
    parser.add_argument("--port-range", type=_port_range, metavar="A-B", help="listen at ports of this range only")
    parser.add_argument("--keys", metavar="FILE", help=KEYS_HELP)


def _add_dispatching(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--journal", metavar="DIR", help="keep jobs here, so that they outlive the dispatcher (default: they do not)"
    )
    parser.add_argument(
        "--audit-log", metavar="FILE", help="write here who opened, joined, steered and drained, and who was refused"
    )
    parser.add_argument(
        "--scaling", metavar="FILE", help="a TOML file: the policy, prices, and what each principal may have"
    )
    parser.add_argument("--http-port", type=_port, metavar="N", help="serve /livez, /readyz and /metrics here")
    parser.add_argument(
        "--http-bind", metavar="HOST", default="127.0.0.1", help="where that port listens (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--http-token",
        metavar="FILE",
        help="the token /metrics asks for; made if it is not there (default: no metrics)",
    )
    parser.add_argument(
        "--service-file", metavar="PATH", help="write address and credentials here, for workers and trainers"
    )


def _add_resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sandbox",
        nargs="?",
        const="",
        metavar="USER",
        help="jobs' code gains no privileges, and cannot trace or signal other processes; with USER, as root and by "
        "TCP: it runs as that user",
    )
    parser.add_argument(
        "--sandbox-write", nargs="*", metavar="DIR", help="jobs' code writes beneath these folders and nowhere else"
    )
    parser.add_argument(
        "--sandbox-read",
        nargs="*",
        metavar="DIR",
        help="it reads these, what it writes to, Python and the system's files, and nothing else",
    )
    parser.add_argument("--sandbox-memory-bytes", type=_whole, metavar="N", help="memory of each worker's own, at most")
    parser.add_argument("--tags", type=_tags, default=(), metavar="A,B", help="what jobs may ask for with requires=")
    parser.add_argument("--threads", type=_whole, metavar="N", help="of each worker (default: its share of the cores)")
    parser.add_argument(
        "--memory-bytes", type=_whole, metavar="N", help="buffers of each worker (default: its share of a tenth)"
    )


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,99}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: letters, digits, - and _, at most 100")
    return text


def _count(text: str) -> int | str:
    if text == "auto":
        return text
    count = _natural(text)
    if count > MOST_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text} must be at most {MOST_PROCESSES}: each is a process of this host")
    return count


def _workers_asked(text: str) -> int | str | tuple[int, int] | None:
    """What a job may be given: at least one."""
    if text in ("auto", "own"):
        return text if text == "auto" else None
    return _least_and_most(text, 1) if "-" in text else _whole(text)


def _worker_range(text: str) -> int | str | tuple[int, int]:
    """How many workers there are: none, where those who bring them wait for a job."""
    if text == "auto":
        return text
    return _least_and_most(text, 0) if "-" in text else _natural(text)


def _least_and_most(text: str, fewest: int) -> tuple[int, int]:
    before, _, after = text.partition("-")
    least, most = _natural(before), _whole(after)
    if least < fewest:
        raise argparse.ArgumentTypeError(f"{text!r} has {least} at the least, and {fewest} is the fewest")
    if least > most:
        raise argparse.ArgumentTypeError(f"{text!r} has more at the least than at the most")
    return least, most


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _whole(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 1")
    return number


def _price(text: str) -> float:
    price = float(text)
    if not 0 <= price < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a price")
    return price


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and a day")
    return seconds


def _port(text: str) -> int:
    port = _natural(text)
    if port > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return port


def _port_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    ends = (_port(first), _port(last)) if dash else (0, 0)
    if not 0 < ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 5000-5099")
    return ends


def _tags(text: str) -> tuple[str, ...]:
    tags = tuple(tag.strip() for tag in text.split(","))
    if not all(tags):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty tag; they are names with commas between")
    return tags
