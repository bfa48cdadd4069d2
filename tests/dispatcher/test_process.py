"""The dispatcher as a process: killed, stopped, doubled, and fed code it must not run."""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from penstock.core.errors import AuthenticationError, JournalLockedError
from penstock.dispatcher.main import DispatcherConfig
from penstock.dispatcher.service import DispatcherStatistics
from penstock.wire.addresses import Listening
from penstock.wire.blobs import blob_hash, put_blob_pieces
from penstock.wire.control import ControlClient
from penstock.wire.figures import RunnerFigures, StageFigures
from penstock.wire.messages import AgentBeat, Beat, BlobPiece, GetBlob, ListJobs
from tests.dispatcher.serving import (
    DEADLINE_S,
    KNOWN,
    FakeAgent,
    bound_stream,
    client,
    ended,
    grant,
    open_job,
    opening,
    put_blobs,
    served,
    spec,
    started,
)
from tests.keys import SERVER, new_key
from tests.security.web import get
from tests.waiting import wait_until


def config(journal: Path, **options: Any) -> DispatcherConfig:
    return DispatcherConfig(server=SERVER, known=KNOWN, journal=str(journal), **options)


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no process behind if what is done with it fails."""
    try:
        yield
    except BaseException:
        killed(process)
        raise


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    ended(process)


def test_killed_at_any_moment_it_gives_the_same_answers_after_a_restart(tmp_path: Path) -> None:
    """Splits are asked for without pause while the dispatcher is killed again and again."""
    process, address = started(config(tmp_path))
    given: list[tuple[int, ...]] = []
    failures: list[BaseException] = []
    stop = threading.Event()
    with ending(process), client(address) as control:
        put_blobs(control)
        wide = opening(spec=spec(10_000_000))
        open_job(control, wide)
        agent = FakeAgent(address)
        agent.register()
        agent.serve_runner()
        stream = bound_stream(control, wide)

        def read() -> None:
            try:
                after = None
                while not stop.is_set():
                    given.append(grant(control, stream, after))
                    after = given[-1][-1]
            except BaseException as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(4):
                so_far = len(given)
                wait_until(lambda so_far=so_far: failures or len(given) >= so_far + 40, "more splits")
                killed(process)
                process, again = started(config(tmp_path))
                assert again == address, "a dispatcher with port 0 binds the port it had"
            so_far = len(given)
            wait_until(lambda: failures or len(given) >= so_far + 40, "more splits")
        finally:
            stop.set()
            reader.join(DEADLINE_S)
            agent.close()
            killed(process)
        assert not failures
        assert [ordinal for ordinals in given for ordinal in ordinals] == list(range(sum(map(len, given))))


def test_it_ends_when_told_to_and_leaves_a_clean_journal(tmp_path: Path) -> None:
    process, address = started(config(tmp_path))
    with ending(process), client(address) as control:
        put_blobs(control)
        open_job(control)
    process.send_signal(signal.SIGTERM)
    ended(process)
    assert process.returncode == 0
    assert not (tmp_path / "journal.db-wal").exists()
    with served(tmp_path) as running, client(running.address) as control:
        assert len(control.ask(ListJobs(), timeout_s=DEADLINE_S, what="jobs").jobs) == 1


def test_a_second_dispatcher_refuses_to_start_and_names_the_first(tmp_path: Path) -> None:
    process, _ = started(config(tmp_path))
    try:
        with pytest.raises(RuntimeError, match=f"JournalLockedError: .* in use by process {process.pid} on "):
            started(config(tmp_path))
        with pytest.raises(JournalLockedError):
            served(tmp_path).__enter__()
    finally:
        killed(process)


def test_a_port_taken_by_somebody_else_is_given_up_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.dispatcher.main.REBIND_DEADLINE_S", 0.1)
    with served(tmp_path / "a") as running:
        first = running.address
    with (
        served(tmp_path / "b", listening=Listening(port=int(first.rpartition(":")[2]))),
        served(tmp_path / "a") as running,
    ):
        second = running.address
        assert second != first
    with served(tmp_path / "a") as running:
        assert running.address == second


def test_it_never_unpickles_and_never_imports_what_runs_user_code(tmp_path: Path) -> None:
    """Payloads whose unpickling would leave a file behind go all the way through it."""
    trace = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.write_text, (trace, "somebody unpickled this"))

    assert pickle.loads(pickle.dumps(Trap())) and trace.exists()
    trace.unlink()
    payloads = [pickle.dumps(Trap()), cloudpickle.dumps([Trap(), lambda: 1])]
    # An empty package of that name, so that what is imported is what the dispatcher itself asks for.
    before = (
        "import importlib.util, pickle, types\n"
        "package = types.ModuleType('penstock')\n"
        "package.__path__ = list(importlib.util.find_spec('penstock').submodule_search_locations)\n"
        "sys.modules['penstock'] = package\n"
        "def refuse(*given, **named): sys.stderr.write('UNPICKLED'); raise SystemExit(9)\n"
        "pickle.loads = pickle.load = pickle.Unpickler = refuse\n"
    )
    after = (
        "import json\n"
        "names = ('cloudpickle', 'numpy', 'pyarrow', 'penstock.')\n"
        "sys.stderr.write('MODULES' + json.dumps([m for m in sys.modules if m.startswith(names)]))"
    )
    process, address = started(config(tmp_path / "journal"), before=before, after=after)
    with ending(process), client(address) as control:
        names = []
        for payload in payloads:
            names.append(blob_hash(payload))
            for piece in put_blob_pieces(payload):
                control.ask(piece, timeout_s=DEADLINE_S, what="storing")
        given = opening(spec=spec(graph=names[0], splits=names[1]))
        open_job(control, given)
        agent = FakeAgent(address)
        agent.register()
        agent.serve_runner()
        stream = bound_stream(control, given)
        assert grant(control, stream, None)
        for name, payload in zip(names, payloads):
            answer = control.ask(GetBlob(hash=name), timeout_s=DEADLINE_S, what="reading")
            assert isinstance(answer, BlobPiece) and answer.piece == payload
        agent.close()
    process.send_signal(signal.SIGTERM)
    errors = ended(process)
    assert process.returncode == 0, errors
    assert not trace.exists() and "UNPICKLED" not in errors
    modules = json.loads(errors.partition("MODULES")[2])
    packages = {name.split(".")[1] for name in modules if name.startswith("penstock.")}
    assert packages == {"core", "wire", "policies", "control", "dispatcher"}
    assert not [name for name in modules if not name.startswith("penstock.")]


@pytest.mark.alone
def test_it_starts_quickly(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from penstock.dispatcher.main import Dispatcher, DispatcherConfig\n"
        "from penstock.wire.credentials import Credentials\n"
        "took = []\n"
        "for number in range(5):\n"
        "    begin = time.perf_counter()\n"
        "    config = DispatcherConfig(server=Credentials.new(), known=(), journal=f'{sys.argv[1]}/{number}')\n"
        "    dispatcher = Dispatcher(config)\n"
        "    took.append(time.perf_counter() - begin)\n"
        "    dispatcher.close()\n"
        "print(min(took))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(found.stdout) < 0.15


def test_health_and_metrics_have_a_port_of_their_own(tmp_path: Path) -> None:
    with (
        served(tmp_path, http_port=0, http_token_file=str(tmp_path / "token")) as running,
        client(running.address) as control,
    ):
        put_blobs(control)
        open_job(control)
        port = running.dispatcher.http_port
        assert port is not None
        assert get(port, "/livez") == (200, "alive")
        assert get(port, "/readyz") == (200, "ready")
        assert get(port, "/elsewhere")[0] == 404
        wait_until(
            lambda: (
                "penstock_dispatcher_jobs 1.0"
                in get(port, "/metrics", token=(tmp_path / "token").read_text().strip())[1]
            ),
            "the job in the metrics",
        )
        text = get(port, "/metrics", token=(tmp_path / "token").read_text().strip())[1]
        assert 'penstock_dispatcher_requests_total{kind="OpenEpoch"} 1.0' in text
        assert "penstock_dispatcher_blobs 2.0" in text
        assert "penstock_dispatcher_commit_seconds_total" in text
        running.service.publish = lambda: None
        running.service.statistics = DispatcherStatistics(broken="the disk is full")
        assert get(port, "/readyz") == (503, "the disk is full")
        assert get(port, "/livez") == (200, "alive"), "restarting it would not make room"


def test_metrics_tell_what_workers_and_clients_said(tmp_path: Path) -> None:
    with (
        served(tmp_path, http_port=0, http_token_file=str(tmp_path / "token")) as running,
        client(running.address) as control,
    ):
        agent = FakeAgent(running.address)
        try:
            put_blobs(control)
            agent.register()
            view = open_job(control)
            runner = agent.serve_runner().runner
            figures = RunnerFigures(
                streams=2, rounds=5, nbytes=4096, stages=(StageFigures(3, 'map("f")', 70, 560, 1.5),)
            )
            said = AgentBeat(agent=agent.agent, runners=(runner,), statistics={runner: figures, "gone": figures})
            agent.control.ask(said, timeout_s=DEADLINE_S, what="beating")
            taken = Beat(
                job=view.job,
                client=opening().client,
                consumer=0,
                attempt=view.attempt,
                version=0,
                batches=9,
                wait_s=0.5,
            )
            control.ask(taken, timeout_s=DEADLINE_S, what="beating")
            port = running.dispatcher.http_port
            assert port is not None
            wait_until(
                lambda: (
                    "penstock_client_batches_total{"
                    in get(port, "/metrics", token=(tmp_path / "token").read_text().strip())[1]
                ),
                "what was said",
            )
            text = get(port, "/metrics", token=(tmp_path / "token").read_text().strip())[1]
        finally:
            agent.control.close()
    of_worker = f'job="{view.job}",worker="{agent.worker}"'
    of_stage = f'job="{view.job}",node="3",stage="map(\\"f\\")",worker="{agent.worker}"'
    for line in (
        f"penstock_worker_streams{{{of_worker}}} 2.0",
        f"penstock_stream_rounds_total{{{of_worker}}} 5.0",
        f"penstock_stream_bytes_total{{{of_worker}}} 4096.0",
        f"penstock_stage_busy_seconds_total{{{of_stage}}} 1.5",
        f'penstock_client_batches_total{{consumer="0",job="{view.job}",replica="0",trainer=""}} 9.0',
        f'penstock_client_wait_seconds_total{{consumer="0",job="{view.job}",replica="0",trainer=""}} 0.5',
    ):
        assert line in text.splitlines(), text


def test_a_loop_that_hangs_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.dispatcher.http.HANGS_AFTER_S", -1.0)
    with served(http_port=0) as running:
        port = running.dispatcher.http_port
        assert port is not None
        status, text = get(port, "/livez")
        assert status == 503 and "has not come around" in text
        assert get(port, "/readyz")[0] == 503


def test_strangers_are_not_let_in(tmp_path: Path) -> None:
    stranger = new_key()
    with served(tmp_path) as running, ControlClient(running.address, stranger, name="stranger") as control:
        with pytest.raises(AuthenticationError):
            control.ask(ListJobs(), timeout_s=DEADLINE_S, what="jobs")
        assert running.service.statistics.requests == {}
