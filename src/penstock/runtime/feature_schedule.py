"""In which order the transforms of an operator are applied, and which of them together.

Transforms that differ in their features alone are applied to several features at once, as long as these fit into a
core's own cache. What lies scattered is copied to be together, if it is small: a large feature takes longer to copy
than a call takes. What is made is used as soon as that is possible, while it is in the cache, and forgotten after its
last use. None of this changes a result: each row is looked at by itself.

How many values features have is seen with the first batch. Others differ a little, and are cut as that one was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.core.errors import InvalidPipelineError
from penstock.graph.parameters import text
from penstock.graph.transforms import CustomTransform, FeatureTransform
from penstock.kernels.features import FeatureValues, UnfitFeatureError
from penstock.runtime.feature_stacks import FeaturePlace, Span, Stack, joined, spans
from penstock.runtime.feature_transforms import Application, application

STACKED_VALUES = 1 << 15
COPIED_VALUES = 1 << 11


class Together(NamedTuple):
    """Transforms that differ in their features alone."""

    apply: Application
    transforms: Sequence[FeatureTransform]


class StackStep(NamedTuple):
    """Transforms that are applied at once, and what they make: a stack."""

    apply: Application
    first: FeatureTransform
    inputs: tuple[tuple[Span, ...], ...]
    made: int
    done: tuple[int, ...] = ()
    """Stacks that are not read afterwards."""

    def run(self, stacks: Sequence[Stack | None]) -> Stack:
        rows = stack_at(stacks, self.inputs[0][0].stack).rows
        try:
            return Stack(self.apply([values_at(stacks, own) for own in self.inputs]), rows)
        except UnfitFeatureError as error:
            raise InvalidPipelineError(f"{text(self.first)}: {error}") from None


class TransformSchedule:
    """Steps, and where what they make is found afterwards."""

    def __init__(self, steps: Sequence[StackStep], outputs: Sequence[tuple[Span, ...]]) -> None:
        self._steps, self.outputs = steps, outputs

    def run(self, sources: Sequence[Stack]) -> list[Stack | None]:
        """Return the stacks that outputs are in, by number."""
        stacks: list[Stack | None] = [*sources, *[None] * len(self._steps)]
        for step in self._steps:
            stacks[step.made] = step.run(stacks)
            for number in step.done:
                stacks[number] = None
        return stacks


def stack_at(stacks: Sequence[Stack | None], number: int) -> Stack:
    found = stacks[number]
    assert found is not None, f"stack {number} was forgotten before its last use"
    return found


def values_at(stacks: Sequence[Stack | None], places: Sequence[Span]) -> FeatureValues:
    """Return features of one kind as one."""
    return joined([stack_at(stacks, stack).cut(first, last) for stack, first, last in places])


def alike(transforms: Sequence[FeatureTransform], read: Iterable[str]) -> list[Together]:
    """Return transforms in groups that differ in their features alone, each after those whose features it reads.

    `read` are the features that are there before. Where one of them is made anew, the order is what it was.
    """
    if not {name for each in transforms for name in each.outputs}.isdisjoint(read):
        return [Together(application(each), [each]) for each in transforms]
    depths: dict[str, int] = {}
    groups: dict[tuple[object, ...], list[FeatureTransform]] = {}
    depth_of: dict[tuple[object, ...], int] = {}
    for number, each in enumerate(transforms):
        depth = depths[each.out] = 1 + max(depths.get(name, 0) for name in each.inputs)
        # A transform that is not ours may look at all rows together.
        key = (depth, number if isinstance(each, CustomTransform) else None, *each.work)
        groups.setdefault(key, []).append(each)
        depth_of[key] = depth
    return [Together(application(groups[key][0]), groups[key]) for key in sorted(groups, key=depth_of.__getitem__)]


def planned(
    groups: Iterable[Together],
    sources: Sequence[Stack],
    places: Mapping[str, FeaturePlace],
    outputs: Sequence[Sequence[str]],
) -> tuple[TransformSchedule, list[Stack]]:
    """Return the schedule for batches like one, and that batch's stacks; `places` says where its features are."""
    stacks, found, steps = [*sources], dict(places), []
    for apply, transforms in groups:
        for some, inputs in _cut(transforms, stacks, found):
            step = StackStep(apply, some[0], tuple(map(spans, inputs)), len(stacks))
            stacks.append(step.run(stacks))
            steps.append(step)
            found.update({each.out: FeaturePlace(step.made, at) for at, each in enumerate(some)})
    wanted = [spans(found[name] for name in names) for names in outputs]
    kept = {span.stack for each in wanted for span in each}.union(range(len(sources)))
    return TransformSchedule(_ordered(steps, len(sources), kept), wanted), stacks


def _cut(
    transforms: Sequence[FeatureTransform], stacks: Sequence[Stack], found: Mapping[str, FeaturePlace]
) -> Iterator[tuple[Sequence[FeatureTransform], list[list[FeaturePlace]]]]:
    """Yield transforms that are applied at once, with the places of all their first inputs, all their second, ..."""
    start, size = 0, 0
    inputs: list[list[FeaturePlace]] = []
    for number, each in enumerate(transforms):
        own = [found[name] for name in each.inputs]
        own_size = sum(stacks[stack].size(at) for stack, at in own)
        if inputs and (size + own_size > STACKED_VALUES or not _fits(inputs, own, stacks)):
            yield transforms[start:number], inputs
            start, size, inputs = number, 0, []
        inputs = inputs or [[] for _ in own]
        for column, place in zip(inputs, own):
            column.append(place)
        size += own_size
    yield transforms[start:], inputs


def _fits(inputs: Sequence[Sequence[FeaturePlace]], own: Sequence[FeaturePlace], stacks: Sequence[Stack]) -> bool:
    """Return whether features are of the kind of those before them, and lie behind them or are small."""
    for column, (stack, at) in zip(inputs, own):
        before = column[-1]
        if stacks[stack].kind != stacks[before.stack].kind:
            return False
        if before != (stack, at - 1) and stacks[stack].size(at) > COPIED_VALUES:
            return False
    return True


def _ordered(steps: Sequence[StackStep], sources: int, kept: set[int]) -> list[StackStep]:
    """Return the steps so that what is made is used soon, and is forgotten unless it is kept."""
    readers: dict[int, list[StackStep]] = defaultdict(list)
    missing: dict[int, set[int]] = {}
    for step in steps:
        missing[step.made] = {span.stack for own in step.inputs for span in own if span.stack >= sources}
        for stack in missing[step.made]:
            readers[stack].append(step)
    ready = [step for step in reversed(steps) if not missing[step.made]]
    order: list[StackStep] = []
    left = {stack: len(found) for stack, found in readers.items()}
    while ready:
        step = ready.pop()
        read = {span.stack for own in step.inputs for span in own if span.stack >= sources}
        for stack in read:
            left[stack] -= 1
        order.append(step._replace(done=tuple(stack for stack in read - kept if not left[stack])))
        for reader in reversed(readers[step.made]):
            missing[reader.made].discard(step.made)
            if not missing[reader.made]:
                ready.append(reader)
    return order
