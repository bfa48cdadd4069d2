"""Penstock: describe an input pipeline once, read ready batches anywhere."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import image
    from penstock.api import transforms
    from penstock.api.dataset import Dataset, mix
    from penstock.api.iteration import DatasetIterator
    from penstock.api.loader import Loader
    from penstock.api.offloading import Offloading, OffloadLoader, offload
    from penstock.api.ray_service import RayService
    from penstock.api.readers import (
        from_generator,
        from_huggingface,
        from_items,
        from_torch,
        range,
        read_arrow,
        read_csv,
        read_files,
        read_images,
        read_jsonl,
        read_numpy,
        read_parquet,
        read_saved,
        read_text,
        read_tfrecord,
        read_webdataset,
    )
    from penstock.api.registered import read_registered, register
    from penstock.api.resampling import count_classes
    from penstock.api.saving import SavedDataset
    from penstock.api.services import LocalService
    from penstock.api.statistics import LoaderStatistics, StreamStatistics
    from penstock.core.element import Ragged
    from penstock.core.errors import (
        AuthenticationError,
        BatchShapeError,
        CacheAwayWarning,
        CannotListenError,
        CannotWriteError,
        CodecError,
        CorruptRecordError,
        DataError,
        DeadlyElementError,
        DispatcherUnavailableError,
        EmptyInputError,
        ErrorBudgetExceededError,
        FileChangedError,
        ForkedLoaderError,
        FunctionShippingError,
        ImageDecodeError,
        ImpureFunctionWarning,
        InterruptedReadError,
        InvalidArgumentError,
        InvalidPipelineError,
        JobCancelledError,
        JobFailedError,
        JobMismatchError,
        JournalCorruptError,
        JournalError,
        JournalLockedError,
        JournalWriteError,
        LargeFunctionWarning,
        LimitReachedError,
        MissingExtraError,
        NoFilesError,
        NotPermittedError,
        NurseryGoneError,
        PenstockError,
        PipelineMismatchError,
        ProtocolError,
        RefusedError,
        RemoteError,
        ReplayError,
        SaveFailedError,
        SaveMismatchError,
        ServiceClosedError,
        ServiceFileMissingError,
        ServiceNotReadyError,
        SnapshotGoneError,
        StateMismatchError,
        StorageUnavailableError,
        SupersededError,
        TableConflictError,
        TruncatedFileError,
        WaitTimeoutError,
        WorkersLostError,
    )
    from penstock.core.keyed import KeyedDense, KeyedRagged
    from penstock.core.leaves import register_type
    from penstock.graph.expressions import Column, Expression, col
    from penstock.graph.ops import SkipErrors
    from penstock.kernels.registered import register_transform
    from penstock.policies.offloading import Offload, OffloadProfile
    from penstock.runtime.stats import StageStatistics, Statistics
    from penstock.samplers.drawing import Feed
    from penstock.sources.delta_log import TableSnapshot
    from penstock.sources.example_proto import decode_example, encode_example
    from penstock.submission.options import Limits
    from penstock.warehouse.features import Feature
    from penstock.warehouse.leases import SnapshotLease
    from penstock.warehouse.reading import read_features
    from penstock.warehouse.session import Session
    from penstock.warehouse.session_reader import SessionReader
    from penstock.warehouse.table import Table
    from penstock.warehouse.writing import StripeSize
    from penstock.wire.caching import CachingLine
    from penstock.wire.figures import JobFigures, StageFigures, TrainerFigures, WorkerFigures
    from penstock.wire.messages import JobLine, TrainerLine, WorkerLine
    from penstock.wire.modes import Access, Placement, Ranks, Sharding, Share
    from penstock.wire.scaling import DecisionLine

__version__ = "0.1.0"

__all__ = [
    "Access",
    "AuthenticationError",
    "BatchShapeError",
    "CacheAwayWarning",
    "CachingLine",
    "CannotListenError",
    "CannotWriteError",
    "CodecError",
    "Column",
    "CorruptRecordError",
    "DataError",
    "Dataset",
    "DatasetIterator",
    "DeadlyElementError",
    "DecisionLine",
    "DispatcherUnavailableError",
    "EmptyInputError",
    "ErrorBudgetExceededError",
    "Expression",
    "Feature",
    "Feed",
    "FileChangedError",
    "ForkedLoaderError",
    "FunctionShippingError",
    "ImageDecodeError",
    "ImpureFunctionWarning",
    "InterruptedReadError",
    "InvalidArgumentError",
    "InvalidPipelineError",
    "JobCancelledError",
    "JobFailedError",
    "JobFigures",
    "JobLine",
    "JobMismatchError",
    "JournalCorruptError",
    "JournalError",
    "JournalLockedError",
    "JournalWriteError",
    "KeyedDense",
    "KeyedRagged",
    "LargeFunctionWarning",
    "LimitReachedError",
    "Limits",
    "Loader",
    "LoaderStatistics",
    "LocalService",
    "MissingExtraError",
    "NoFilesError",
    "NotPermittedError",
    "NurseryGoneError",
    "Offload",
    "OffloadLoader",
    "OffloadProfile",
    "Offloading",
    "PenstockError",
    "PipelineMismatchError",
    "Placement",
    "ProtocolError",
    "Ragged",
    "Ranks",
    "RayService",
    "RefusedError",
    "RemoteError",
    "ReplayError",
    "SaveFailedError",
    "SaveMismatchError",
    "SavedDataset",
    "ServiceClosedError",
    "ServiceFileMissingError",
    "ServiceNotReadyError",
    "Session",
    "SessionReader",
    "Sharding",
    "Share",
    "SkipErrors",
    "SnapshotGoneError",
    "SnapshotLease",
    "StageFigures",
    "StageStatistics",
    "StateMismatchError",
    "Statistics",
    "StorageUnavailableError",
    "StreamStatistics",
    "StripeSize",
    "SupersededError",
    "Table",
    "TableConflictError",
    "TableSnapshot",
    "TrainerFigures",
    "TrainerLine",
    "TruncatedFileError",
    "WaitTimeoutError",
    "WorkerFigures",
    "WorkerLine",
    "WorkersLostError",
    "col",
    "count_classes",
    "decode_example",
    "encode_example",
    "from_generator",
    "from_huggingface",
    "from_items",
    "from_torch",
    "image",
    "mix",
    "offload",
    "range",
    "read_arrow",
    "read_csv",
    "read_features",
    "read_files",
    "read_images",
    "read_jsonl",
    "read_numpy",
    "read_parquet",
    "read_registered",
    "read_saved",
    "read_text",
    "read_tfrecord",
    "read_webdataset",
    "register",
    "register_transform",
    "register_type",
    "transforms",
]

if not TYPE_CHECKING:
    # Names are loaded when they are used. The processes of a service are of this package too, and each of them needs
    # little of it: what all would load before their own work begins is what a trainer waits for.
    _HOMES = {
        "penstock.api.dataset": ("Dataset", "mix"),
        "penstock.api.iteration": ("DatasetIterator",),
        "penstock.api.loader": ("Loader",),
        "penstock.api.offloading": ("OffloadLoader", "Offloading", "offload"),
        "penstock.api.registered": ("read_registered", "register"),
        "penstock.api.resampling": ("count_classes",),
        "penstock.api.saving": ("SavedDataset",),
        "penstock.api.ray_service": ("RayService",),
        "penstock.api.services": ("LocalService",),
        "penstock.submission.options": ("Limits",),
        "penstock.samplers.drawing": ("Feed",),
        "penstock.api.statistics": ("LoaderStatistics", "StreamStatistics"),
        "penstock.core.element": ("Ragged",),
        "penstock.core.errors": (
            "AuthenticationError",
            "BatchShapeError",
            "CacheAwayWarning",
            "CannotListenError",
            "CannotWriteError",
            "CodecError",
            "CorruptRecordError",
            "DataError",
            "DeadlyElementError",
            "DispatcherUnavailableError",
            "EmptyInputError",
            "ErrorBudgetExceededError",
            "FileChangedError",
            "ForkedLoaderError",
            "FunctionShippingError",
            "ImageDecodeError",
            "InterruptedReadError",
            "InvalidArgumentError",
            "InvalidPipelineError",
            "JobCancelledError",
            "JobFailedError",
            "JobMismatchError",
            "JournalCorruptError",
            "JournalError",
            "JournalLockedError",
            "JournalWriteError",
            "ImpureFunctionWarning",
            "LargeFunctionWarning",
            "LimitReachedError",
            "MissingExtraError",
            "NoFilesError",
            "NotPermittedError",
            "NurseryGoneError",
            "PenstockError",
            "PipelineMismatchError",
            "ProtocolError",
            "RefusedError",
            "RemoteError",
            "ReplayError",
            "SaveFailedError",
            "SaveMismatchError",
            "ServiceClosedError",
            "ServiceFileMissingError",
            "ServiceNotReadyError",
            "SnapshotGoneError",
            "StateMismatchError",
            "StorageUnavailableError",
            "SupersededError",
            "TableConflictError",
            "TruncatedFileError",
            "WaitTimeoutError",
            "WorkersLostError",
        ),
        "penstock.core.keyed": ("KeyedDense", "KeyedRagged"),
        "penstock.core.leaves": ("register_type",),
        "penstock.graph.expressions": ("Column", "Expression", "col"),
        "penstock.graph.ops": ("SkipErrors",),
        "penstock.kernels.registered": ("register_transform",),
        "penstock.policies.offloading": ("Offload", "OffloadProfile"),
        "penstock.runtime.stats": ("StageStatistics", "Statistics"),
        "penstock.sources.example_proto": ("decode_example", "encode_example"),
        "penstock.sources.delta_log": ("TableSnapshot",),
        "penstock.warehouse.features": ("Feature",),
        "penstock.warehouse.leases": ("SnapshotLease",),
        "penstock.warehouse.reading": ("read_features",),
        "penstock.warehouse.session": ("Session",),
        "penstock.warehouse.session_reader": ("SessionReader",),
        "penstock.warehouse.table": ("Table",),
        "penstock.warehouse.writing": ("StripeSize",),
        "penstock.wire.figures": ("JobFigures", "StageFigures", "TrainerFigures", "WorkerFigures"),
        "penstock.wire.messages": ("JobLine", "TrainerLine", "WorkerLine"),
        "penstock.wire.caching": ("CachingLine",),
        "penstock.wire.scaling": ("DecisionLine",),
        "penstock.wire.modes": ("Access", "Placement", "Ranks", "Share", "Sharding"),
    }
    _MODULES = {"image": "penstock.image", "transforms": "penstock.api.transforms"}
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

    # Packages for frameworks, loaded as `ps.keras` is used. Not in `__all__`: `import *` would import the frameworks.
    _ADAPTERS = ("accelerate", "huggingface", "jax", "keras", "lightning", "tensorflow", "torch")

    def _adapter(name: str) -> object:
        from importlib import import_module

        try:
            return import_module(f"penstock.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "penstock":
                raise
            from penstock.core.errors import MissingExtraError

            raise MissingExtraError(error.name, name) from error

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _ADAPTERS:
            return _adapter(name)
        if name not in __all__:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        if name in _MODULES:
            return import_module(_MODULES[name])
        value = getattr(import_module(_HOME_OF.get(name, "penstock.api.readers")), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
