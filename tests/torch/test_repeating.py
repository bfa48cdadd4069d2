"""One sample in a thousand is made twice: datasets with generators of their own are found, and nothing is disturbed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.torch import DataLoader, NonDeterministicSampleError, NonDeterministicSampleWarning
from penstock.torch.fetching import check_on_host
from penstock.torch.repeating import EVERY, twin_of
from tests.torch.datasets import Noisy, OwnGenerator


@pytest.fixture(autouse=True)
def seed():
    """Which samples are made twice follows from the loader's seed."""
    torch.manual_seed(1)


@pytest.fixture(scope="module")
def service():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_PRELOAD", "torch")
        service = ps.LocalService(workers=1)
    with service:
        yield service


def test_a_dataset_that_draws_from_its_own_generator_is_named_with_index_and_remedy(service):
    loader = DataLoader(OwnGenerator(4 * EVERY), batch_size=200, num_workers=1, service=service)
    with pytest.warns(NonDeterministicSampleWarning, match=r"OwnGenerator\[\d+\] gave another.*__getitem__") as found:
        drawn = torch.cat(list(loader))
    assert len(found) == 1
    loader.close()
    # It goes on as if it had been asked once.
    rng = np.random.default_rng(7)
    assert drawn.tolist() == [rng.random() for _ in range(4 * EVERY)]


def test_strict_makes_it_an_error(service):
    loader = DataLoader(OwnGenerator(4 * EVERY), batch_size=200, num_workers=1, service=service, strict=True)
    with pytest.raises(NonDeterministicSampleError, match="OwnGenerator"):
        list(loader)
    loader.close()


def test_transforms_that_draw_from_the_global_generators_are_well(service):
    loader = DataLoader(Noisy(3 * EVERY), batch_size=200, num_workers=1, service=service, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonDeterministicSampleWarning)
        assert sum(len(batch["index"]) for batch in loader) == 3 * EVERY
    loader.close()


def test_a_twin_shares_data_and_copies_what_changes():
    class Transform:
        def __init__(self):
            self.generator, self.calls = torch.Generator().manual_seed(1), 0

    class Holder:
        def __init__(self):
            self.array, self.names, self.steps = np.zeros(9), [str(i) for i in range(500)], [Transform()]

    dataset = Holder()
    twin = twin_of(dataset)
    assert twin.array is dataset.array and twin.names is dataset.names
    twin.steps[0].calls += 1
    torch.rand(1, generator=twin.steps[0].generator)
    assert dataset.steps[0].calls == 0
    assert torch.equal(dataset.steps[0].generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_tensors_of_an_accelerator_are_refused_with_the_reason():
    class OnDevice(torch.Tensor):
        device = torch.device("cuda", 0)  # there is none here, and none is needed to say that it cannot leave

    with pytest.raises(RuntimeError, match=r"cuda:0.*cannot leave a worker.*pin_memory"):
        check_on_host([{"x": torch.zeros(2).as_subclass(OnDevice)}])
