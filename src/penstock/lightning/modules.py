"""Pipelines for Lightning: a data module whose loaders know their rank, and loaders for Fabric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from lightning.pytorch import LightningDataModule

from penstock.api.dataset import Dataset
from penstock.api.loader import Loader
from penstock.api.offloading import offloaded
from penstock.api.services import OwnedService
from penstock.core.errors import InvalidArgumentError
from penstock.torch.pipelines import TensorLoader
from penstock.wire.modes import Ranks


class DataModule(LightningDataModule):
    """A data module over Penstock: each part is a dataset, a loader, or a function of this rank that makes one.

    A function is called when Lightning asks, in the rank's own process, with a `ps.Ranks` that says which it is:

        DataModule(train=lambda ranks: dataset.distribute(service, job="run", ranks=ranks, order="deterministic"))

    Arrays arrive as tensors. With `overfit_batches` the same batches come in every epoch.

    `offload` is a service whose workers help this host's processors to make the training batches, where `train` is a
    dataset and that is faster (`ps.offload`); what was started for it ends with the training.
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        offload: OwnedService | str | PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._offload = offload
        self._offloaded: Any = None
        self._given = {"train": train, "val": val, "test": test, "predict": predict}

    def setup(self, stage: str) -> None:
        if self._offload is not None and stage == "fit" and self._offloaded is None:
            if self.trainer.world_size > 1:
                raise InvalidArgumentError(
                    f"DataModule(offload=...) on {self.trainer.world_size} ranks: a way of reading is measured by one; "
                    "give train= a function of a ps.Ranks that reads the service"
                )
            self._offloaded = self._given["train"] = offloaded(self._given["train"], self._offload)

    def teardown(self, stage: str) -> None:
        if self._offloaded is not None and stage == "fit":
            self._offloaded.close()

    def train_dataloader(self) -> Any:
        made = self._made("train")
        return SameEpoch(made) if self.trainer.overfit_batches and isinstance(made, TensorLoader) else made

    def val_dataloader(self) -> Any:
        return self._made("val")

    def test_dataloader(self) -> Any:
        return self._made("test")

    def predict_dataloader(self) -> Any:
        return self._made("predict")

    def _made(self, part: str) -> Any:
        given = self._given[part]
        if given is None:
            return []
        if isinstance(given, (Dataset, Loader)) or not callable(given):
            if self.trainer.world_size > 1 and isinstance(given, (Dataset, Loader)):
                raise InvalidArgumentError(
                    f"DataModule({part}=...) on {self.trainer.world_size} ranks: give a function of a ps.Ranks, "
                    "lambda ranks: dataset.distribute(service, job=..., ranks=ranks), so that each rank reads its share"
                )
            return _tensors(given)
        return _tensors(given(Ranks(self.trainer.world_size, self.trainer.global_rank)))


class SameEpoch:
    """A loader of which every iteration is the same epoch."""

    def __init__(self, loader: TensorLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        self._loader.set_epoch(0)
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


class FabricLoader:
    """A dataset or a loader for Fabric: its arrays arrive as tensors on this process's device.

        loader = ps.lightning.FabricLoader(fabric, dataset.distribute(service, job="run", ranks=ranks))

    `fabric.setup_dataloaders` takes a `penstock.torch.DataLoader`, and keeps its class; of pipelines it takes none.
    It has the state of what it reads.
    """

    def __init__(self, fabric: Any, pipeline: Dataset | Loader) -> None:
        self._fabric, self._loader = fabric, TensorLoader(pipeline)

    def __iter__(self) -> Iterator[Any]:
        return map(self._fabric.to_device, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the trainer stands: `fabric.save` takes it."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration where the state was taken."""
        self._loader.load_state_dict(state_dict)


def _tensors(given: Any) -> Any:
    return TensorLoader(given) if isinstance(given, (Dataset, Loader)) else given
