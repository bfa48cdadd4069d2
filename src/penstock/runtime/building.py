"""Which stage runs an operator, and what stages are built with.

The modules of `ops/` register what they have: `@builds(ops.Take)` stands before the function that makes the stage of a
`take`, and `@step_of(ops.Select)` before the one that makes a step. What can be a step needs no stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from penstock.core.errors import InvalidPipelineError
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.runtime.calling import Calling
from penstock.runtime.contract import Chunk, Stage
from penstock.runtime.empty_passes import EmptyPasses
from penstock.runtime.keeping import CachePoint, SplitKeeping
from penstock.runtime.keeping_elements import ElementKeeping
from penstock.runtime.ordered import Outcome
from penstock.runtime.pass_numbers import PassesOver
from penstock.runtime.placement import StreamPlacement
from penstock.runtime.pool import ThreadPool
from penstock.runtime.resources import Resources
from penstock.runtime.stats import StageMeter
from penstock.sources.base import Source


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage is built with, beside its operator and its inputs.

    No stage keeps it, or a function that does: it refers to the run, and what a run holds would wait for the garbage
    collector.
    """

    meter: StageMeter
    seed: int
    pool: ThreadPool | None
    resources: Resources
    placement: StreamPlacement
    calling: Calling
    with_idents: bool
    """Elements must have identities: a function that takes `rng` stands downstream."""
    keep_rest: bool
    """The elements that fill no group at the end are not to be given."""
    source_of: Callable[[SourceNode], Source]
    reads_by_index: Callable[[SourceNode], bool]
    passes_over: Callable[[Node, Node], PassesOver]
    """(operator, one of its inputs) → how often it goes over that one, and how those passes are numbered."""
    empty_passes: Callable[[Node], EmptyPasses]
    """What counts the passes of an operator that give nothing."""
    kept_at: Callable[[Node], KeptAt | None]
    """What a caching point keeps, and with what; None: nothing is kept there."""
    meter_before: Callable[[str], StageMeter]
    """Makes a meter for work that is counted as a stage of its own, before this one."""


KeptAt: TypeAlias = tuple[CachePoint, SplitKeeping | ElementKeeping]


class Step(Protocol):
    """What a transform does to a chunk. It keeps nothing from one chunk to the next."""

    def run(self, chunk: Chunk) -> Outcome: ...


BuildStage: TypeAlias = Callable[..., Stage]
"""(operator, site, the stages of its inputs) → its stage, or that of its input where nothing is to be run."""
MakeStep: TypeAlias = Callable[..., Step]
"""(operator, calling, meter) → a step."""

STAGES: dict[type[Node], BuildStage] = {}
STEPS: dict[type[Node], MakeStep] = {}

AnyBuild = TypeVar("AnyBuild", bound=BuildStage)
AnyMakeStep = TypeVar("AnyMakeStep", bound=MakeStep)


def builds(*operators: type[Node]) -> Callable[[AnyBuild], AnyBuild]:
    """Register a function that builds the stage of some operators."""

    def register(build: AnyBuild) -> AnyBuild:
        STAGES.update(dict.fromkeys(operators, build))
        return build

    return register


def step_of(*operators: type[Node]) -> Callable[[AnyMakeStep], AnyMakeStep]:
    """Register a function that makes the step of some operators."""

    def register(make: AnyMakeStep) -> AnyMakeStep:
        STEPS.update(dict.fromkeys(operators, make))
        return make

    return register


def build_stage(node: Node, site: Site, *inputs: Stage) -> Stage:
    """Return what runs an operator."""
    try:
        build = STAGES[type(node)]
    except KeyError:
        raise InvalidPipelineError(f"{node.name}: there is no way to run it") from None
    return build(node, site, *inputs)


def make_step(node: Node, calling: Calling, meter: StageMeter) -> Step:
    """Return what an operator does to a chunk."""
    try:
        make = STEPS[type(node)]
    except KeyError:
        raise InvalidPipelineError(f"{node.name} cannot be a step of a fused operator") from None
    return make(node, calling, meter)
