"""Values of the right type that nobody honest sends, each of which once ended a process: found by `make fuzz`."""

from __future__ import annotations

import ast
import logging
import tracemalloc
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.core.errors import CodecError, ProtocolError, StateMismatchError
from penstock.core.ids import RunnerId
from penstock.wire.framing import decode_message
from penstock.wire.jobs import Cut, Regroup
from penstock.wire.messages import RunnerPlace
from penstock.wire.received import flags_received, received
from penstock.wire.runs import decode_run
from tests.dispatcher.serving import AGENT_KEY, JOB, FakeAgent, client, open_job, put_blobs, served
from tests.waiting import wait_until

ROOT = Path(penstock.__file__).parent


@pytest.mark.parametrize("name", ["\0", "", "a/b", "x" * 101])
def test_an_agent_that_registers_a_process_by_a_name_nobody_can_have_ends_no_dispatcher(
    tmp_path: Path, name: str
) -> None:
    """The dispatcher failed over it for good: the name was in its journal by then."""
    for _ in range(2):  # the second time on the journal of the first
        with served(tmp_path) as running, client(running.address) as control:
            put_blobs(control)
            agent = FakeAgent(running.address)
            try:
                open_job(control)
                place = RunnerPlace(RunnerId(name), agent.worker, JOB, "tcp://127.0.0.1:1", verifier=AGENT_KEY.public)
                agent.register(place)
                agent.register()
                assert agent.serve_runner().job == JOB
            finally:
                agent.close()


def test_an_agent_cannot_make_anothers_process_its_own_by_naming_its_key() -> None:
    with served() as running, client(running.address) as control:
        put_blobs(control)
        open_job(control)
        ours, theirs = FakeAgent(running.address), FakeAgent(running.address, 1)
        try:
            ours.register()
            place = ours.serve_runner()
            registry = running.service._doors.registry
            wait_until(lambda: registry.principal_of(place.verifier) is not None, "a runner that is known")
            theirs.register(RunnerPlace(RunnerId("other"), theirs.worker, JOB, "tcp://127.0.0.1:1", 0, place.verifier))
            found = registry.principal_of(place.verifier)
            assert found is not None and found.name == place.runner
        finally:
            ours.close()
            theirs.close()


@pytest.mark.parametrize(
    "claim",
    [
        lambda: received(Cut(since=1 << 60), 2),
        lambda: flags_received(Regroup(1, (1 << 40,)), width=1, given=[0]),
        lambda: flags_received(None, width=1, given=[1 << 31]),
    ],
    ids=["since", "width", "given"],
)
def test_a_state_that_claims_more_outputs_than_there_can_be_is_refused_before_memory_is_taken_for_them(
    claim: object,
) -> None:
    with pytest.raises(StateMismatchError, match="at most 262,144 can be"):
        claim()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("width", "given"),
    [(-1, (0,)), (0, ()), (2, (1,)), (1, (1, 1)), (1, (-1,)), (1 << 62, (0,))],
    ids=["backwards", "none", "few", "many", "negative", "wide"],
)
def test_rounds_that_no_consumers_can_have_had_are_no_message(width: int, given: tuple[int, ...]) -> None:
    """With rounds of -1 outputs a runner, and whoever merged such states, made a list of flags without an end."""
    sent = msgspec.msgpack.encode([None, 2, [], 1, [width, given]])
    with pytest.raises(ProtocolError, match="rounds"):
        received(decode_message(msgspec.msgpack.Decoder(Cut), sent), 1)


@pytest.mark.parametrize(
    "description",
    [[1, 2, [9, 1 << 28]], [1, 1 << 27, [2, []]], [1, 1 << 22, [0, [], []]], [1, 1 << 22, [5, "<i4", [0], b""]]],
    ids=["number for bytes", "empty tuples", "empty dicts", "empty rows"],
)
def test_a_run_of_a_few_bytes_takes_no_memory_for_what_it_claims(description: list[object]) -> None:
    """A column that gave a number for its bytes was zeros of that size: 28 bytes took 2 GB."""
    layout = msgspec.msgpack.encode(description)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode_run(layout, [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_logged_with_a_message_has_no_name_that_a_log_record_has_itself() -> None:
    """`logging` raises for those, where a failure was to be written down: that ended a runner's data thread."""
    taken = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {key.value!r}"
        for path in sorted(ROOT.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict)
        for key in keyword.value.keys
        if isinstance(key, ast.Constant) and key.value in taken
    ]
    assert not wrong, wrong
