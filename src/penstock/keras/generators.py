"""The generators that a model's layers draw from, dropout's among them. Keras does not save them with the weights."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import keras
import numpy as np


def generators_of(model: Any) -> list[Any]:
    """Return where they stand, JSON-able; with PyTorch, layers draw from its global generator too."""
    states: list[Any] = [keras.ops.convert_to_numpy(variable).tolist() for variable in _variables(model)]
    if keras.backend.backend() == "torch":
        import torch

        states.append(base64.b85encode(zlib.compress(torch.get_rng_state().numpy().tobytes())).decode())
    return states


def put_generators_back(model: Any, states: list[Any]) -> None:
    for variable, state in zip(_variables(model), states):
        variable.assign(np.array(state, variable.dtype))
    if states and isinstance(states[-1], str) and keras.backend.backend() == "torch":
        import torch

        content = bytearray(zlib.decompress(base64.b85decode(states[-1])))
        torch.set_rng_state(torch.frombuffer(content, dtype=torch.uint8))


def _variables(model: Any) -> list[Any]:
    return [variable for variable in model.variables if variable.path.endswith("seed_generator_state")]
