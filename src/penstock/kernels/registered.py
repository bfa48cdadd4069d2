"""Transforms that installed packages add, by name.

A pipeline names such a transform and brings no code of it. A process that runs the pipeline finds it among what was
registered there, and else among the entry points of installed packages: only what is installed where the process runs
can be called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeAlias

from penstock.core.errors import InvalidArgumentError, InvalidPipelineError

GROUP = "penstock.transforms"
"""The group of entry points: a name, and a function that makes a feature of features."""

TransformFunction: TypeAlias = Callable[..., Any]
_registered: dict[str, TransformFunction] = {}


def register_transform(name: str, function: TransformFunction) -> None:
    """Add a transform that pipelines call by name: `ps.transforms.Custom(name, ("f1",), out="f2")`.

    `function` gets the features that the transform reads, each as `ps.transforms.Numbers` or `ps.transforms.Lists`, and
    the parameters by name. It returns one of these, with as many rows.

    Pipelines carry the name alone. So that workers find it, the package that has the function is installed there and
    names it as an entry point: `"acme.double" = "acme.features:double"`, in the group `penstock.transforms`.

    >>> import numpy as np, penstock as ps
    >>> ps.register_transform("acme.double", lambda x, by=2: ps.transforms.Numbers(x.values * by, x.presence))
    >>> batches = ps.from_items([{"f1": np.array([1.5, 2.0], np.float32)}])
    >>> double = ps.transforms.Custom("acme.double", ("f1",), out="f2")
    >>> next(iter(batches.transform_features(double)))["f2"].tolist()
    [3.0, 4.0]
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"name={name!r} must be a name, best with your package's before it: 'acme.double'")
    if not callable(function):
        raise InvalidArgumentError(f"function={function!r} must be a function of features")
    _registered[name] = function


def find_transform(name: str) -> TransformFunction:
    """Return what was registered under a name, here or by an installed package."""
    if name not in _registered:
        for entry in entry_points(group=GROUP, name=name):
            register_transform(name, entry.load())
    if name not in _registered:
        raise InvalidPipelineError(
            f"no transform {name!r} is registered here; install the package that has it, with an entry point of that "
            f"name in the group {GROUP!r}, where the pipeline runs"
        )
    return _registered[name]
