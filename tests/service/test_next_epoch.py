"""The next epoch is opened while this one ends: no idle worker, nothing twice, and nothing left of one nobody wants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import penstock as ps
from penstock.client import ahead
from tests.waiting import wait_until

from .checks import Background

LIMITS = ps.Limits(timeout_s=60)
ELEMENTS = 64


@dataclass(frozen=True)
class Slow:
    """Takes its time for the last element, and notes down when it began and ended each of them."""

    folder: str

    def __call__(self, number: int) -> int:
        began = time.monotonic()
        if number == ELEMENTS - 1:
            time.sleep(0.6)
        with Path(self.folder, str(number)).open("a") as file:
            file.write(f"{began} {time.monotonic()}\n")
        return number

    def calls(self, number: int) -> list[tuple[float, float]]:
        path = Path(self.folder, str(number))
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(began), float(ended)) for began, ended in map(str.split, lines)]


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2, threads=1) as service:
        yield service


def test_a_worker_that_has_nothing_left_works_for_the_next_epoch(service: ps.LocalService, tmp_path: Path) -> None:
    work = Slow(str(tmp_path))
    with ps.range(ELEMENTS).map(work, threads=1).distribute(service, job="ends", limits=LIMITS) as loader:
        for _ in range(4):
            assert sorted(loader) == list(range(ELEMENTS))
    early = [number for number in range(ELEMENTS - 1) if work.calls(number)[2][0] < work.calls(ELEMENTS - 1)[1][1]]
    assert early, "none of the third epoch was made before the second one's last element"
    first, second = work.calls(ELEMENTS - 1)[:2]
    assert not any(first[0] < work.calls(number)[1][0] < first[1] for number in range(ELEMENTS - 1)), "a first epoch"
    assert second[0] > first[1]


def test_epochs_in_order_are_the_same_as_ever(service: ps.LocalService) -> None:
    pipeline = ps.range(200).shuffle(50, seed=3).map(lambda x: x, threads=1).batch(7)
    with pipeline.distribute(service, job="in order", order="deterministic", limits=LIMITS) as loader:
        epochs = [[batch.tolist() for batch in loader] for _ in range(5)]
    for epoch, batches in enumerate(epochs):
        with pipeline.distribute(service, job=f"epoch {epoch}", order="deterministic", limits=LIMITS) as lone:
            lone.set_epoch(epoch)
            assert [batch.tolist() for batch in lone] == batches


def test_a_state_from_the_end_of_an_epoch_goes_on_there_though_the_next_one_was_opened(
    service: ps.LocalService, tmp_path: Path
) -> None:
    work = Slow(str(tmp_path))
    pipeline = ps.range(ELEMENTS).map(work, threads=1)
    with pipeline.distribute(service, job="states", limits=LIMITS) as loader:
        assert len(list(loader)) == ELEMENTS
        elements = iter(loader)
        seen = [next(elements) for _ in range(ELEMENTS - 1)]
        wait_until(lambda: len(work.calls(ELEMENTS - 1)) == 2, "the last element")
        state = loader.state_dict()
        seen += list(elements)
        assert sorted(seen) == list(range(ELEMENTS))
        loader.load_state_dict(state)
        assert list(loader) == seen[-1:]
        assert sorted(loader) == list(range(ELEMENTS))


def test_another_epoch_than_the_next_may_be_asked_for(service: ps.LocalService) -> None:
    pipeline = ps.range(300).shuffle(100, seed=1).batch(10)
    with pipeline.distribute(service, job="others", order="deterministic", limits=LIMITS) as loader:
        first, second, _ = ([batch.tolist() for batch in loader] for _ in range(3))
        for epoch, expected in ((1, second), (0, first), (1, second)):
            loader.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == expected


def test_ranks_of_different_speeds_read_each_epoch_once(service: ps.LocalService) -> None:
    def read(rank: int) -> list[list[int]]:
        pipeline = ps.range(240).map(lambda x: x, threads=1)
        ranks = ps.Ranks(2, rank)
        with pipeline.distribute(service, job="ranks", ranks=ranks, limits=LIMITS) as loader:
            epochs = []
            for _ in range(5):
                epoch = []
                for number in loader:
                    epoch.append(int(number))
                    time.sleep(0.001 * rank)
                epochs.append(epoch)
            return epochs

    readers = [Background(lambda rank=rank: read(rank)) for rank in range(2)]
    for epochs in zip(*(reader.result() for reader in readers)):
        assert Counter(number for epoch in epochs for number in epoch) == Counter(range(240))


def test_an_epoch_that_nobody_comes_for_is_closed(service: ps.LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LINGER_S", 0.2)
    with ps.range(ELEMENTS).distribute(service, job="left", limits=LIMITS) as loader:
        for _ in range(3):
            assert sorted(loader) == list(range(ELEMENTS))

        def readers() -> int:
            return next(line.clients for line in service.jobs() if line.job == "left")

        wait_until(lambda: readers() == 0, "the epoch that was opened ahead to be closed")
        assert sorted(loader) == list(range(ELEMENTS))
