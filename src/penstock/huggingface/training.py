"""`transformers.Trainer` over our loaders: they stay what they are, and their state is in the trainer's checkpoints."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from penstock.accelerate.preparing import AcceleratedLoader, prepare
from penstock.api.offloading import offloaded
from penstock.core.errors import InvalidArgumentError
from penstock.torch.loader import DataLoader


class TrainerMixin:
    """Put before a `Trainer` class: it trains on a Penstock loader, and resumes after the batch trained last.

        class MyTrainer(ps.huggingface.TrainerMixin, transformers.Seq2SeqTrainer): ...

    With `train_loader=`, that is read: a dataset or a loader of Penstock's, or a `penstock.torch.DataLoader`. Without,
    a `penstock.torch.DataLoader` over `train_dataset` is made, as the trainer would make torch's. On several ranks a
    pipeline is dealt by its service.

    With `offload=`, a service, its workers help this host's processors to make the batches of a dataset, the
    `train_loader`, where that is faster (`ps.offload`); what was started for it ends with `train()`.
    """

    args: Any
    accelerator: Any

    def __init__(self, *args: Any, train_loader: Any = None, offload: Any = None, **named: Any) -> None:
        self._train_loader, self._offload = train_loader, offload
        self._prepared: AcceleratedLoader | None = None
        self._offloaded: Any = None
        self._resumes_from: Path | None = None
        super().__init__(*args, **named)
        # The loader is put where it stood; nothing is read again to be skipped.
        self.args.ignore_data_skip = True
        self.add_callback(_SaveDataState(self))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        given = self._train_loader if self._train_loader is not None else self._over_dataset()
        if self._offload is not None:
            given = self._offloaded = offloaded(given, self._offload)
        self._prepared = prepare(self.accelerator, given)
        if self._resumes_from is not None:
            self._load(self._prepared, self._resumes_from / self.data_file)
            self._resumes_from = None
        return self._prepared

    def train(self, resume_from_checkpoint: str | PathLike[str] | bool | None = None, *args: Any, **named: Any) -> Any:
        found: Any = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self.args.output_dir)
        self._resumes_from = Path(found) if found else None
        try:
            return super().train(found or None, *args, **named)  # type: ignore[misc]
        finally:
            if self._offloaded is not None:
                self._offloaded.close()
                self._offloaded = None

    @property
    def data_file(self) -> str:
        """The name of this rank's file in a checkpoint."""
        return f"penstock-data-rank-{self.args.process_index}-of-{self.args.world_size}.json"

    def save_data_state(self, folder: Path) -> None:
        if self._prepared is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.data_file).write_text(json.dumps(self._prepared.state_dict()))

    def _load(self, loader: AcceleratedLoader, path: Path) -> None:
        if not path.exists():
            raise InvalidArgumentError(
                f"{path} is not there: the checkpoint was saved by another trainer, or on another number of ranks, and "
                "does not say where the data stood"
            )
        state = json.loads(path.read_text())
        accumulated = self.args.gradient_accumulation_steps
        if state["batches"] and accumulated > 1 and len(loader) % accumulated:
            raise InvalidArgumentError(
                f"resuming inside an epoch of {len(loader)} batches, of which {accumulated} make a step: the last step "
                "would be lost. Make the epoch a multiple of it with drop_last or take(), or save at the end of epochs"
            )
        loader.load_state_dict(state)

    def _over_dataset(self) -> DataLoader:
        trainer: Any = self
        args = self.args
        dataset, collate = trainer.train_dataset, trainer.data_collator
        if type(dataset).__module__.startswith("datasets."):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        return DataLoader(
            dataset,
            batch_size=trainer._train_batch_size,
            sampler=trainer._get_train_sampler(dataset),
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            drop_last=args.dataloader_drop_last,
            pin_memory=args.dataloader_pin_memory and self.accelerator.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            seed_samples=True,  # a sample that is fetched ahead of a checkpoint draws the same after it
        )


class _SaveDataState(transformers.TrainerCallback):
    def __init__(self, trainer: TrainerMixin) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._trainer.save_data_state(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


class LoaderTrainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` that reads a Penstock loader.

    trainer = ps.huggingface.LoaderTrainer(model, args, train_loader=dataset.batch(8).distribute(4))
    trainer.train(resume_from_checkpoint=True)
    """
