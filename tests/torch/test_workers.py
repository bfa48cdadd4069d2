"""`penstock.torch.DataLoader` over worker processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import warnings
import weakref

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader

import penstock as ps
from penstock.torch import DataLoader
from tests.torch.datasets import (
    Counting,
    Deadly,
    Divided,
    Exhausted,
    Informed,
    Keyed,
    LazySampler,
    Noisy,
    Squares,
    Together,
    greet,
    pairs,
    sets,
)
from tests.torch.kinds import KINDS, same


@pytest.fixture(scope="module")
def service():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_PRELOAD", "torch")  # each test is a job, and each job has processes of its own
        service = ps.LocalService(workers=2)
    with service:
        yield service


def drawn(loader):
    return [(batch["index"].tolist(), batch["drawn"].tolist()) for batch in loader]


def test_random_transforms_depend_on_neither_workers_nor_kills_nor_resume(service):
    runs = []
    for workers in (1, 4):
        torch.manual_seed(1)
        with_workers = DataLoader(Noisy(24), batch_size=2, shuffle=True, num_workers=workers, service=service)
        runs.append([drawn(with_workers), drawn(with_workers)])
        with_workers.close()
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]

    torch.manual_seed(1)
    own = DataLoader(Noisy(24), batch_size=2, shuffle=True, num_workers=2, service=service)
    batches = iter(own)
    seen = drawn([next(batches) for _ in range(5)])
    for pid in list(service.worker_pids().values())[:1]:
        os.kill(pid, signal.SIGKILL)
    seen += drawn([next(batches) for _ in range(2)])
    state = json.loads(json.dumps(own.state_dict()))
    seen += drawn(batches)
    assert seen == runs[0][0]
    own.close()

    torch.manual_seed(99)  # the trainer's own random numbers are its own affair
    resumed = DataLoader(Noisy(24), batch_size=2, shuffle=True, num_workers=4, service=service)
    before = torch.get_rng_state()
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn(iterator) == runs[0][0][7:]
    resumed.close()


def test_samples_seeded_here_are_those_of_workers(service):
    torch.manual_seed(1)
    there = DataLoader(Noisy(6), batch_size=2, num_workers=2, service=service)
    seen = drawn(there)
    there.close()
    torch.manual_seed(1)
    assert drawn(DataLoader(Noisy(6), batch_size=2, seed_samples=True)) == seen


def test_a_failing_sample_raises_its_own_error_and_the_loader_goes_on(service):
    loader = DataLoader(Squares(20), batch_size=4, num_workers=2, service=service)
    iterator = iter(loader)
    seen = []
    while True:
        try:
            batch = next(iterator, None)
        except LookupError as error:
            assert str(error) == "thirteen" and any("__getitem__" in note for note in error.__notes__)
            seen.append("error")
            continue
        if batch is None:
            break
        seen.append(int(batch[0]))
    assert seen == [0, 16, 64, "error", 256]
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stray_stop_iteration_is_not_the_end(workers, service):
    loader = DataLoader(Exhausted(), num_workers=workers, service=service)
    iterator = iter(loader)
    assert next(iterator).item() == 0
    with pytest.raises(RuntimeError, match="StopIteration, which is no end of the data"):
        next(iterator)
    assert next(iterator).item() == 2
    loader.close()


def test_a_sample_that_ends_its_process_is_an_error_after_some_tries(service):
    loader = DataLoader(Deadly(), num_workers=2, service=service)
    seen = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker exited unexpectedly: 6 .* batch [02] of epoch 0"):
        seen.extend(map(torch.Tensor.item, loader))
    assert seen == [0, 1][: len(seen)]
    loader.close()


def test_what_cannot_travel_is_named_by_its_place_in_the_batch(service):
    loader = DataLoader(Squares(2), num_workers=1, service=service, collate_fn=sets)
    with pytest.raises(ps.CodecError, match=r"leaf \['batch'\]\['values'\] is a set"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_profiler_sees_the_loader_as_it_sees_torchs(workers, service):
    loader = DataLoader(Squares(4), batch_size=2, num_workers=workers, service=service)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 2
    assert any("enumerate(DataLoader)" in event.key for event in profile.key_averages())
    loader.close()


def test_a_changed_dataset_is_sent_again(service):
    dataset = Squares(4)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, service=service, collate_fn=pairs)
    assert [list(batch) for batch in loader] == [[(0,), (1,), (4,), (9,)]]
    dataset.factor = 10
    assert [list(batch) for batch in loader] == [[(0,), (10,), (40,), (90,)]]
    loader.close()


def test_workers_know_who_they_are(service):
    torch.manual_seed(3)
    expected = TorchDataLoader(Informed(), 2, num_workers=2, collate_fn=list, worker_init_fn=greet)
    expected = [*expected]
    torch.manual_seed(3)
    loader = DataLoader(Informed(), 2, num_workers=2, collate_fn=list, worker_init_fn=greet, service=service)
    assert [*loader] == expected
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterable_dataset_is_read_as_torch_reads_it(persistent, service):
    options = {"batch_size": 3, "num_workers": 2, "persistent_workers": persistent}
    expected = [[batch.tolist() for batch in TorchDataLoader(Divided(31), **options)]] * 2
    loader = DataLoader(Divided(31), **options, service=service)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == expected
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest == expected[0][3:]
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_with_a_state_of_its_own_is_placed_by_it(workers, service):
    def make():
        return DataLoader(Counting(30), batch_size=3, num_workers=workers, service=service)

    loader = make()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    loader.close()
    resumed = make()
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is read again
        assert [batch.tolist() for batch in resumed] == rest
    resumed.close()


def test_what_a_sampler_gives_is_what_the_dataset_gets(service):
    keys = [["a", (1, None)], [slice(1, 3), -4], [b"x", 2.5]]
    loader = DataLoader(Keyed(), batch_sampler=keys, num_workers=1, service=service, collate_fn=list)
    assert list(loader) == [[repr(key) for key in batch] for batch in keys]
    loader.close()
    single = DataLoader(Squares(3), batch_size=None, num_workers=1, service=service)
    assert [value.tolist() for value in single] == [[0], [1], [4]]
    single.close()
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    together = DataLoader(Together(5), batch_sampler=batches, num_workers=1, service=service)
    assert [value.tolist() for value in together] == [[[0, 2], [1, 2]], [[2, 2], [3, 2]], [[4, 1]]]
    together.close()


def test_default_collate_gives_what_torchs_gives_for_every_kind_of_sample(service):
    assert len(KINDS) >= 40
    names = [name for name in KINDS if name != "mapping"]
    samples = [KINDS[name] for name in names]
    order = [[number, number] for number in range(len(samples))]
    expected = list(TorchDataLoader(samples, batch_sampler=order))
    loader = DataLoader(samples, batch_sampler=order, num_workers=1, service=service)
    made = list(loader)
    loader.close()
    assert [name for name, one, other in zip(names, made, expected) if not same(one, other)] == []


def test_two_iterators_of_one_loader_do_not_disturb_each_other(service):
    loader = DataLoader(Squares(6), batch_size=2, num_workers=1, service=service)
    both = [(one[0].item(), other[0].item()) for one, other in zip(loader, loader)]
    assert both == [(0, 0), (4, 4), (16, 16)]
    loader.close()


@pytest.mark.parametrize("leave", ["break", "error"])
def test_a_loop_that_is_left_lets_go_of_its_workers(leave, service):
    def left(loader):
        for _ in loader:
            if leave == "error":
                raise KeyError(leave)
            return

    loader = DataLoader(Squares(12), batch_size=2, num_workers=1, service=service)
    for _ in range(2):
        with contextlib.suppress(KeyError):
            left(loader)
        assert len(loader._channels) == 1, "the next epoch has the same workers"
    channel, gone = weakref.ref(loader._channels[0]), weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None and channel() is None


def test_a_failed_batch_is_behind_a_state_that_is_saved_after_it():
    loader = DataLoader(Squares(20), batch_size=4)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(LookupError):
        next(iterator)
    state = loader.state_dict()
    assert next(iterator)[0].item() == 256
    loader.load_state_dict(state)
    assert [batch[0].item() for batch in loader] == [256]


def test_a_sampler_that_does_not_give_the_same_again_is_found():
    loader = DataLoader(Squares(12), sampler=LazySampler(12))
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
        torch.rand(())
    state = loader.state_dict()
    fresh = DataLoader(Squares(12), sampler=LazySampler(12))
    fresh.load_state_dict(state)
    with pytest.raises(ps.StateMismatchError, match="did not give the same 4 items"):
        next(iter(fresh))


def test_a_loader_in_the_callers_thread_resumes_with_the_same_order():
    torch.manual_seed(4)
    loader = DataLoader(Squares(12), batch_size=2, sampler=RandomSampler(range(12)))
    whole = [batch.tolist() for batch in loader]
    torch.manual_seed(4)
    iterator = iter(loader)
    head = [next(iterator).tolist() for _ in range(2)]
    del iterator  # as a loop that is left
    state = json.loads(json.dumps(loader.state_dict()))
    torch.manual_seed(5)
    fresh = DataLoader(Squares(12), batch_size=2, sampler=RandomSampler(range(12)))
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state, "saved right after it was loaded, it is the same"
    assert head + [batch.tolist() for batch in fresh] == whole
    assert fresh.state_dict()["epoch"] == state["epoch"] + 1, "saved after the loop, it is the next epoch"
