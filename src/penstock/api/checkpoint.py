"""Whether a saved state belongs to a pipeline.

A state says where sources, shuffles and counters stood. It is refused when an operator that decides which elements
come, or in which order, is not the one it was saved with; a changed map or batch only changes what is made of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import StateMismatchError
from penstock.graph.fingerprint import SourceDigest, summary
from penstock.graph.node import Node

STATE_VERSION = 1
HARMLESS = frozenset(
    {"Map", "Batch", "PaddedBatch", "RaggedBatch", "Select", "Drop", "Rename", "Prefetch", "WithLength"}
)
"""Operators whose change makes other batches of the same elements: a warning, not a refusal."""


@dataclass(frozen=True, slots=True)
class PipelineSignature:
    """One entry per operator, sources first: `[label, digest, kind]`."""

    entries: list[list[str]]

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another pipeline, naming the difference; warn of one that does not matter."""
        if not isinstance(state, Mapping) or "version" not in state or "pipeline" not in state:
            raise StateMismatchError("this is not a state: it was not made by state_dict()")
        if state["version"] != STATE_VERSION:
            raise StateMismatchError(
                f"the state has version {state['version']}; this release reads version {STATE_VERSION}"
            )
        saved, own = _deciding(state["pipeline"]), _deciding(self.entries)
        if saved != own:
            raise StateMismatchError(
                f"the state was saved by another pipeline: {_first_difference(saved, own)}. "
                "Load it into the pipeline it was saved with, or start the epoch anew"
            )
        if state["pipeline"] != self.entries:
            changed = [label for label, *rest in self.entries if [label, *rest] not in state["pipeline"]]
            what = f"{', '.join(changed)} changed" if changed else "operators were removed"
            warnings.warn(
                f"since the state was saved, {what}; the same elements follow, made differently",
                stacklevel=3,
            )


def signature_of(node: Node, source_digest: SourceDigest) -> PipelineSignature:
    operators = summary(node, source_digest=source_digest)
    return PipelineSignature([[each.label, each.digest.hex()[:8], each.kind] for each in operators])


def _deciding(entries: list[list[str]]) -> list[list[str]]:
    return [entry for entry in entries if entry[2] not in HARMLESS]


def _first_difference(saved: list[list[str]], own: list[list[str]]) -> str:
    for old, new in zip(saved, own):
        if old != new:
            if old[2] != new[2]:
                return f"where {old[0]} was there is {new[0]}"
            return f"{new[0]} has other {'files' if new[2].startswith('Read') else 'parameters or code'}"
    longer, verb = (saved, "is gone") if len(saved) > len(own) else (own, "is new")
    return f"{longer[min(len(saved), len(own))][0]} {verb}"
