"""The entries of the table that come with Penstock, and what to do about what has none."""

from __future__ import annotations

import datetime
import io
import os
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from penstock.core.errors import BatchShapeError
from penstock.core.leaves import LeafType, UnsendableError, add_late_type, add_type, name_of

_MEMORY = "penstock_memory"
"""What a tensor that lies in an array's memory has that array as."""


def add_known_types() -> None:
    """Fill the table."""
    add_type(
        OrderedDict, LeafType(name=name_of(OrderedDict, "parts"), flatten=dict, unflatten=OrderedDict, container=True)
    )
    _add_value(complex, lambda number: (number.real, number.imag), lambda parts: complex(*parts))
    _add_value(Decimal, str, Decimal)
    _add_value(uuid.UUID, lambda value: value.bytes, lambda content: uuid.UUID(bytes=content))
    _add_value(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat)
    _add_value(datetime.datetime, _time_parts, lambda parts: _time_of(datetime.datetime.fromisoformat, parts))
    _add_value(datetime.time, _time_parts, lambda parts: _time_of(datetime.time.fromisoformat, parts))
    _add_value(
        datetime.timedelta,
        lambda delta: (delta.days, delta.seconds, delta.microseconds),
        lambda parts: datetime.timedelta(*parts),
    )
    add_late_type("torch", "Tensor", _tensors)
    add_late_type("torch.nn.parameter", "Parameter", lambda module: _tensors(sys.modules["torch"]))


def _add_value(kind: type[Any], flatten: Callable[[Any], Any], unflatten: Callable[[Any], Any]) -> None:
    add_type(kind, LeafType(name=name_of(kind), flatten=flatten, unflatten=unflatten))


# Dates


def _time_parts(value: datetime.datetime | datetime.time) -> tuple[Any, ...]:
    """Return the time as text without its zone, whether it is the second of two such hours, and the zone."""
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _zone_parts(value.tzinfo)


def _zone_parts(zone: datetime.tzinfo | None) -> tuple[Any, ...] | None:
    if zone is None:
        return None
    if type(zone).__module__ == "zoneinfo" and getattr(zone, "key", None):
        return (zone.key,)  # type: ignore[attr-defined]
    if type(zone) is datetime.timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        own_name = None if name == str(datetime.timezone(offset)) else name
        return offset.days, offset.seconds, offset.microseconds, own_name
    raise UnsendableError(
        f"its time zone is a {type(zone).__qualname__}; use a zoneinfo.ZoneInfo, or value.astimezone(datetime.UTC)"
    )


def _time_of(parse: Callable[[str], Any], parts: Sequence[Any]) -> Any:
    text, fold, zone = parts
    return parse(text).replace(tzinfo=_zone_of(zone), fold=fold)


def _zone_of(parts: Sequence[Any] | None) -> datetime.tzinfo | None:
    if parts is None:
        return None
    if len(parts) == 1:
        from zoneinfo import ZoneInfo  # few need it, and it takes as long to load as all of this package

        return ZoneInfo(parts[0])
    days, seconds, microseconds, name = parts
    offset = datetime.timedelta(days, seconds, microseconds)
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


# Tensors


def _tensors(torch: ModuleType) -> LeafType:
    """Return the entry of torch.Tensor. On the way they are arrays, of bytes where numpy has no such type."""

    def flatten(tensor: Any) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsendableError("a tensor travels as dense numbers; send tensor.to_dense(), or dequantize() it")
        if (array := _array_below(tensor)) is not None:
            return array
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        try:
            return plain.numpy()
        except TypeError:  # bfloat16 and its kin
            content = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
            return {"dtype": str(plain.dtype).removeprefix("torch."), "shape": tuple(plain.shape), "content": content}

    def unflatten(content: Any) -> Any:
        if not isinstance(content, dict):
            return torch.from_numpy(_writable(content))
        dtype = vars(torch).get(content["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no dtype {content['dtype']!r}")
        return torch.from_numpy(_writable(content["content"])).view(dtype).reshape(content["shape"])

    def join(tensors: Sequence[Any], _: Any) -> Any:
        first = tensors[0]
        for number, tensor in enumerate(tensors):
            if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
                raise BatchShapeError(
                    f"batch 0 has a tensor of {first.dtype}{list(first.shape)}, batch {number} one of "
                    f"{tensor.dtype}{list(tensor.shape)}; make them equal in map()"
                )
        return torch.cat(list(tensors))

    return LeafType(
        name=name_of(torch.Tensor),
        flatten=flatten,
        unflatten=unflatten,
        has_rows=True,
        join=join,
        nbytes=lambda tensor: int(tensor.nbytes) if tensor.layout is torch.strided else sys.getsizeof(tensor),
    )


def lying_in(array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor over an array's memory that is sent as that array: it is not copied, where readers see it."""
    import torch

    tensor = torch.from_numpy(array)
    setattr(tensor, _MEMORY, array)
    return tensor


def _array_below(tensor: Any) -> np.ndarray[Any, Any] | None:
    array: np.ndarray[Any, Any] | None = tensor.__dict__.get(_MEMORY)
    if array is None or tensor.data_ptr() != array.ctypes.data or tuple(tensor.shape) != array.shape:
        return None  # it was given other memory, or another shape, since
    return array if tensor.is_contiguous() else None


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # Torch has no tensors that cannot be written to, and this memory may be read by others.
    return array if array.flags.writeable else array.copy()


# What has no entry

_REMEDIES: tuple[tuple[type[Any] | tuple[type[Any], ...], str], ...] = (
    ((set, frozenset), "a set has no order; send sorted(value), or an array"),
    (
        (FunctionType, MethodType, type(len)),
        "functions are not data; call it in map(), and send what it returns",
    ),
    (io.IOBase, "an open file belongs to the process that opened it; send what it holds, file.read(), or its path"),
    (os.PathLike, "send str(path)"),
    (memoryview, "send bytes(value)"),
    (Iterator, "it can be read once, and here; send list(value)"),
    (type, "classes are not data; send its name"),
    (ModuleType, "modules are not data; use it in map()"),
)
_REMEDIES_BY_MODULE = {
    "PIL": "send numpy.asarray(image)",
    "pandas": "send value.to_numpy(), or the columns as a dict of arrays",
    "pyarrow": "send value.to_numpy(zero_copy_only=False), or the columns as a dict of arrays",
    "jax": "send numpy.asarray(value)",
    "jaxlib": "send numpy.asarray(value)",
    "tensorflow": "send value.numpy()",
}


def has_mask(kind: type[Any]) -> bool:
    """Say whether a class is that of masked arrays. Where there are some, their module, a slow one, is imported."""
    module = sys.modules.get("numpy.ma")
    return module is not None and issubclass(kind, module.MaskedArray)


def remedy_for(kind: type[Any]) -> str:
    """Return what to do about a value of a class that cannot leave the process.

    >>> remedy_for(set)
    'a set has no order; send sorted(value), or an array'
    """
    if has_mask(kind):
        return "its mask would be lost; send the mask as a leaf of its own"
    for kinds, remedy in _REMEDIES:
        if issubclass(kind, kinds):
            return remedy
    short = kind.__qualname__.rpartition(".")[2]
    register = f"say what it is made of: ps.register_type({short}, flatten, unflatten)"
    known = _REMEDIES_BY_MODULE.get(kind.__module__.partition(".")[0])
    return register if known is None else f"{known}, or {register}"


add_known_types()
