"""An engine whose sources a trainer reads: the same elements, identities and states as with sources of its own.

The trainer answers in the same thread, so that nothing here depends on time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ProtocolError
from penstock.graph.fingerprint import fingerprint
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.passes import optimize
from penstock.relays import trainer_sources
from penstock.relays.relayed_sources import relayed
from penstock.relays.runner_relays import Relays, RunRelays
from penstock.relays.trainer_sources import TrainerSources
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import Run
from penstock.runtime.streams import StreamPart, StreamStopped
from penstock.sources.base import Source, SplitPosition
from penstock.sources.listing_codec import decode_listings, open_source
from penstock.sources.stamps import element_stamps, split_stamp
from penstock.submission.jobs import prepare
from penstock.submission.options import check_options
from penstock.wire.failures import describe_failure
from penstock.wire.frames import AskRows, OfferReading, RelayFailed, RelayRows
from penstock.wire.framing import decode_message, unpack
from penstock.wire.jobs import FeedSpec
from penstock.worker.feeds import fixed_feed

TRAINER = b"trainer"
ROWS, FILES = 600, 4
_decoder = msgspec.msgpack.Decoder(RelayRows)


class Loopback:
    """A runner's sources, and the trainer that reads for them."""

    def __init__(self, dataset: ps.Dataset, memory_bytes: int = 64 << 20) -> None:
        prepared = prepare(dataset._plan, check_options())
        self.graph = optimize(prepared.root)
        self.counts = prepared.counts
        self._trainer = TrainerSources(prepared.root, prepared.listings, None)
        self._relays = Relays(self._answer, memory_bytes)
        self._relays.hear(TRAINER, OfferReading(name="trainer"), [])
        self.run_relays = RunRelays(self._relays)
        self.asks: list[AskRows] = []
        self.answers: list[RelayRows] = []
        nodes = [node for node in walk(self.graph) if isinstance(node, SourceNode)]
        listings = decode_listings(prepared.listings)
        self.sources = {
            node: relayed(open_source(node, listings[number]), number, fingerprint(node), self.run_relays)
            for number, node in enumerate(nodes)
        }

    def _answer(self, peer: bytes, ask: AskRows) -> None:
        self.asks.append(ask)
        try:
            header, buffers = unpack(memoryview(self._trainer.answer(ask)))
        except Exception as error:
            failed = RelayFailed(ask=ask.ask, failure=describe_failure(error))
            self._relays.hear(peer, failed, ())
            return
        self.answers.append(decode_message(_decoder, header))
        self._relays.hear(peer, self.answers[-1], buffers)

    def run(self, part: StreamPart | None = None) -> Run:
        source_of: Callable[[SourceNode], Source] = self.sources.__getitem__
        return Run(self.graph, seed=1, epoch=0, budget=default_budget(1), source_of=source_of, part=part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    for number in range(FILES):
        ids = range(number * ROWS // FILES, (number + 1) * ROWS // FILES)
        lines = [json.dumps({"id": id}) for id in ids]
        (made / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
        lines[3] = lines[-1] = "{no json"
        (made / f"{number}.damaged").write_text("\n".join(lines) + "\n")
        np.save(made / f"{number}.npy", np.array(ids).reshape(-1, 1))
    return made


def drawn(row: Any, rng: np.random.Generator) -> tuple[int, float]:
    return int(row["id"]) if isinstance(row, dict) else int(row[0]), float(rng.random())


SOURCES: dict[str, Callable[[Path], ps.Dataset]] = {
    "by split": lambda root: ps.read_jsonl(f"{root}/*.jsonl").shuffle(50, seed=3),
    "by index": lambda root: ps.read_numpy(f"{root}/*.npy").shuffle(ROWS, seed=3),
    "with bad records": lambda root: ps.read_jsonl(
        f"{root}/*.damaged", on_error=ps.SkipErrors(budget=0.5, quarantine=f"{root}/quarantine.log")
    ),
    "filtered": lambda root: ps.read_jsonl(f"{root}/*.jsonl").filter(lambda row: row["id"] % 3 == 0),
}


def all_of(run: Run, state: Any = None) -> tuple[list[Any], list[Any]]:
    """Return all elements from a state on, and the state after each."""
    run.open(0, state)
    elements: list[Any] = []
    states: list[Any] = []
    while chunk := run.pull(7):
        elements += chunk.elements
        states += [json.loads(json.dumps(chunk.marks.at(k + 1))) for k in range(len(chunk.elements))]
    run.close()
    return elements, states


def of_its_own(dataset: ps.Dataset) -> Run:
    graph = optimize(dataset.node)
    sources = {node: open_source(node) for node in walk(graph) if isinstance(node, SourceNode)}
    return Run(graph, seed=1, epoch=0, budget=default_budget(1), source_of=sources.__getitem__)


@pytest.mark.parametrize("source", SOURCES)
def test_elements_and_random_numbers_are_those_of_sources_of_its_own_and_states_go_over(
    folder: Path, source: str
) -> None:
    dataset = SOURCES[source](folder).map(drawn, threads=1)
    expected, own = all_of(of_its_own(dataset))
    found, relayed_states = all_of(Loopback(dataset).run())
    assert found == expected
    for at in (0, 1, len(expected) // 2, len(expected) - 1):
        assert all_of(Loopback(dataset).run(), own[at])[0] == expected[at + 1 :]
        assert all_of(of_its_own(dataset), relayed_states[at])[0] == expected[at + 1 :]


@pytest.mark.parametrize("source", SOURCES)
def test_answers_of_a_few_bytes_give_the_same(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_sources, "MOST_ROWS", 3)
    monkeypatch.setattr(trainer_sources, "MOST_STANDING", 1)
    dataset = SOURCES[source](folder).map(drawn, threads=1)
    loopback = Loopback(dataset)
    assert all_of(loopback.run())[0] == all_of(of_its_own(dataset))[0]
    assert max(rows.count for rows in loopback.answers) <= 4


@pytest.mark.parametrize("source", ["by split", "by index"])
def test_an_answer_that_is_too_large_for_a_message_is_cut(
    folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_sources, "MAX_REQUEST_BYTES", trainer_sources.HEADER_BYTES + 200)
    dataset = SOURCES[source](folder).map(drawn, threads=1)
    assert all_of(Loopback(dataset).run()) == all_of(of_its_own(dataset))


def test_an_element_that_is_too_large_for_a_message_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_sources, "MAX_REQUEST_BYTES", trainer_sources.HEADER_BYTES + 1)
    with pytest.raises(ps.RefusedError, match="read_by='workers'"):
        all_of(Loopback(SOURCES["by index"](folder)).run())


def test_what_is_fetched_next_is_under_way_before_it_is_fetched(folder: Path) -> None:
    dataset = SOURCES["by index"](folder).map(drawn, threads=1)
    loopback = Loopback(dataset)
    all_of(loopback.run())
    assert sum(rows.count for rows in loopback.answers) == ROWS, "nothing is read twice"
    assert len(loopback.asks) < ROWS / 50, "and not once for each pull"


def test_a_stream_is_told_of_its_own_splits_and_no_others(folder: Path) -> None:
    dataset = SOURCES["by index"](folder).map(drawn, threads=1)
    read: list[Any] = []
    for number in range(3):
        loopback = Loopback(dataset)
        feed = fixed_feed(FeedSpec(kind="dealt", number=number, of=3), loopback.counts)
        found, _ = all_of(loopback.run(StreamPart(feed=feed)))
        assert sum(rows.count for rows in loopback.answers) == len(found)
        read += found
    assert sorted(read) == sorted(all_of(of_its_own(dataset))[0])


def test_bad_records_are_reported_once_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_sources, "MOST_STANDING", 0)  # every answer opens the split anew
    monkeypatch.setattr(trainer_sources, "MOST_ROWS", 2)
    (source,) = Loopback(SOURCES["with bad records"](folder)).sources.values()
    reported: list[int] = []
    source.on_bad = lambda error, index: reported.append(index)  # type: ignore[attr-defined]
    for split in source.splits():
        reader = source.open(split, SplitPosition())
        while len(reader.read(5).elements):
            pass
    assert len(reported) == 2 * FILES


def test_files_of_this_host_are_no_stamps_of_what_a_trainer_reads(folder: Path) -> None:
    (split_source,) = Loopback(SOURCES["by split"](folder)).sources.values()
    assert split_stamp(split_source, split_source.splits()[0]) is None
    (index_source,) = Loopback(SOURCES["by index"](folder)).sources.values()
    assert element_stamps(index_source, [0, 1]) == [None, None]  # type: ignore[arg-type]


def test_a_run_that_is_stopped_reads_no_more(folder: Path) -> None:
    loopback = Loopback(SOURCES["by split"](folder))
    run = loopback.run()
    run.open(0, None)
    run.pull(3)
    loopback.run_relays.stop()
    with pytest.raises(StreamStopped):
        while run.pull(50):
            pass


def test_a_worker_that_means_another_source_is_refused(folder: Path) -> None:
    loopback = Loopback(SOURCES["by split"](folder))
    wrong = AskRows(ask=1, source=0, key="another", most_bytes=1, split=0)
    with pytest.raises(ProtocolError, match="use one release of Penstock"):
        loopback._trainer.answer(wrong)
    right = msgspec.structs.replace(wrong, key=loopback._trainer._keys[0], split=10_000)
    with pytest.raises(ProtocolError, match="asks for split 10000"):
        loopback._trainer.answer(right)
