"""Penstock for Hugging Face: datasets in and out, and a `Trainer` that reads our loaders and resumes where it stood.

`ps.from_huggingface` reads a `datasets.Dataset` or `IterableDataset`; `to_datasets` is the way back.
"""

from typing import TYPE_CHECKING

from penstock.huggingface.converting import to_datasets

if TYPE_CHECKING:
    from penstock.huggingface.training import LoaderTrainer, TrainerMixin

__all__ = ["LoaderTrainer", "TrainerMixin", "to_datasets"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'penstock.huggingface' has no attribute {name!r}")
        from penstock.huggingface import training  # transformers is imported where a trainer is asked for

        return getattr(training, name)
