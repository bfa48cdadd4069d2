"""`ps.transforms`: the declared feature transforms, and what those of your own take and give."""

from penstock.graph.transforms import (
    BoxCox,
    Bucketize,
    Cartesian,
    Clamp,
    ComputeScore,
    FeatureTransform,
    FirstX,
    GetLocalHour,
    IdListTransform,
    Logit,
    MapId,
    NGram,
    Onehot,
    PositiveModulus,
    Sampling,
    SigridHash,
)
from penstock.graph.transforms import CustomTransform as Custom
from penstock.graph.transforms import EnumerateIds as Enumerate
from penstock.kernels.features import Lists, Numbers

__all__ = [
    "BoxCox",
    "Bucketize",
    "Cartesian",
    "Clamp",
    "ComputeScore",
    "Custom",
    "Enumerate",
    "FeatureTransform",
    "FirstX",
    "GetLocalHour",
    "IdListTransform",
    "Lists",
    "Logit",
    "MapId",
    "NGram",
    "Numbers",
    "Onehot",
    "PositiveModulus",
    "Sampling",
    "SigridHash",
]
