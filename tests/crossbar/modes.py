"""Modes of reading, and which of them go together with what: the documented rules, in this one place.

`refusal` answers from the rules alone. Where the package refuses what the rules call legal, or the other way round, one
of the two is wrong: that is what a case then reports.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .pipelines import COUNTED, INDEXABLE, REGROUPING, WITH_RNG_OF_ROWS, Pipeline, Step
from .steps import STEPS, kind_of

STATIC = frozenset({"file", "data", "file_or_data", "hint", "custom"})
ONE_TO_ONE = frozenset(
    {"value", "noise", "blob", "none", "slow", "tokens", "select", "cache", "autocache", "prefetch", "batch_map"}
)
"""With a sampler every unit must give one output."""
BATCH_OPERATORS = frozenset({"batch", "padded_batch", "ragged_batch"})
ORDER_BOUND = frozenset({"shuffle", "bucket", "group", "pack", "interleave", "lists"})
"""What they hold depends on the order of arrival: after a relaxed `distribute` they could not be restored."""
HOLDS_BACK = ORDER_BOUND | {"flat_map", "flat_map_rng", "generator", "unbatch", "rebatch", "resample", "balanced"}
"""What they hold after an output was read by the weights of then: in the middle of an epoch none may be set."""
KEEPS_GROUPS = frozenset({"value", "batch_map", "select", "prefetch", "slow", "filter", "filter_column", "cache"})


class Modes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `distribute` is asked for, in words of the documentation; the adapter turns them into arguments."""

    order: str = "relaxed"
    ranks: int = 1
    replicas: int = 1
    sharding: str = "dynamic"
    guarantee: str | None = None
    uneven: str = "drop"
    reach: int = 32
    """From about so many workers a rank with streams of its own reads."""
    coordinated: bool = False
    sharing: str | None = None
    trainers: int = 1
    trainers_named: bool = False
    """The number of trainers is declared."""
    feed: str | None = None
    streams: int | None = None
    transport: str = "auto"
    memory_bytes: int | None = None
    max_workers: int | None = None
    after: tuple[Step, ...] = ()
    """Operators after `distribute`."""
    own_processes: bool = False
    """`distribute(n)`: worker processes of the loader's own."""
    evaluation: bool = False
    """Read by `evaluation()`: the last step, a batch, is what it is told."""
    moving_cut: bool = False
    """The pipeline is cut elsewhere every few outputs, and where the next epoch begins."""
    read_here: bool = False
    """The trainer reads for workers."""

    @property
    def in_order(self) -> bool:
        """One order of streams, whatever the workers."""
        return self.order == "deterministic" or self.streams == 1

    @property
    def cached_by_arrival(self) -> bool:
        """Of epochs after the first only the process that cached them can go on."""
        return not self.in_order and self.feed is None and any(step.name == "cache" for step in self.after)

    @property
    def in_turn(self) -> bool:
        return self.in_order or self.coordinated

    def __str__(self) -> str:
        plain = Modes()
        shown = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value != getattr(plain, name):
                shown.append(f"{name}={' → '.join(map(str, value)) if name == 'after' else value!r}")
        return ", ".join(shown) or "plain"


class Refusal(msgspec.Struct, frozen=True):
    """Why a combination is refused, and words of which the message must name at least one."""

    rule: str
    names: tuple[str, ...]


Rule = tuple[str, tuple[str, ...], Callable[[Pipeline, Modes], bool]]


def _last_regrouping(pipeline: Pipeline) -> int | None:
    """Return the place of the operator whose groups arrive at the reader one for one."""
    for place in range(len(pipeline.steps) - 1, -1, -1):
        name = pipeline.steps[place].name
        if name in REGROUPING:
            return place
        if name not in KEEPS_GROUPS:
            return None
    return None


def _torn_rest(pipeline: Pipeline) -> bool:
    last = _last_regrouping(pipeline)
    return any(
        step.name in REGROUPING and step.arguments.get("drop_last") and place != last
        for place, step in enumerate(pipeline.steps)
    )


def _mixes_buckets(pipeline: Pipeline) -> bool:
    last = _last_regrouping(pipeline)
    return any(step.name == "bucket" and place != last for place, step in enumerate(pipeline.steps))


def _not_fed(pipeline: Pipeline) -> bool:
    if pipeline.join is not None or pipeline.sources[0].shuffle is not None:
        return True
    batches = [step for step in pipeline.steps if step.name in BATCH_OPERATORS]
    return len(batches) > 1 or any(step.name not in ONE_TO_ONE | BATCH_OPERATORS for step in pipeline.steps)


# (what is refused, words of which the message names one, when)
RULES: tuple[Rule, ...] = (
    (
        "operators that count from the first element are for all workers together (errors.md)",
        ("take", "skip", "enumerate", "zip"),
        lambda p, m: m.sharding != "off" and m.feed is None and p.has(*COUNTED),
    ),
    (
        "a rest that another operator regroups would be dropped by every worker (operators.md)",
        ("drop_last",),
        lambda p, m: m.sharding != "off" and m.feed is None and _torn_rest(p),
    ),
    (
        "sharding='off' promises zero_or_more only",
        ("guarantee", "sharding"),
        lambda p, m: m.sharding == "off" and m.guarantee not in (None, "zero_or_more"),
    ),
    (
        "dynamic sharding promises more than zero_or_more",
        ("guarantee", "sharding"),
        lambda p, m: m.sharding == "dynamic" and m.guarantee == "zero_or_more" and m.feed is None,
    ),
    (
        "sharding='off' has no order",
        ("order", "sharding"),
        lambda p, m: m.sharding == "off" and m.order == "deterministic" and m.feed is None,
    ),
    (
        "there is one stream a worker where splits are assigned up front, or all are read",
        ("streams",),
        lambda p, m: m.streams is not None and m.sharding != "dynamic" and m.feed is None,
    ),
    (
        "in relaxed order every worker opens a stream",
        ("streams",),
        lambda p, m: (m.streams or 1) > 1 and m.order == "relaxed" and not m.coordinated and m.feed is None,
    ),
    (
        "replicas read identical batches, so they need an order",
        ("replica",),
        lambda p, m: m.replicas > 1 and not m.in_order,
    ),
    (
        "uneven='allow' has no fixed order",
        ("uneven", "coordinated"),
        lambda p, m: m.uneven == "allow" and (m.in_turn or m.feed is not None),
    ),
    (
        "coordinated reads need splits that are dealt",
        ("coordinated", "sharding"),
        lambda p, m: m.coordinated and m.sharding == "off",
    ),
    (
        "an operator after the buckets would mix them (coordinated.md)",
        ("bucket_by_length", "filter", "rebatch", "batch"),
        lambda p, m: m.coordinated and _mixes_buckets(p),
    ),
    (
        "sharing does not go together with replicas, uneven='allow' and deterministic order (sharing.md)",
        ("sharing",),
        lambda p, m: (
            m.sharing is not None and (m.replicas > 1 or m.uneven == "allow" or (m.in_turn and not m.coordinated))
        ),
    ),
    (
        "sharing='skip' waits for nobody",
        ("trainers",),
        lambda p, m: m.sharing == "skip" and m.trainers_named,
    ),
    (
        "a sampler's consumer reads alone and in its order (service.md)",
        ("feed", "sharding", "guarantee", "uneven", "replica", "coordinated", "sharing"),
        lambda p, m: (
            m.feed is not None
            and (
                m.sharding != "dynamic"
                or m.guarantee not in (None, "exactly_once")
                or m.uneven != "drop"
                or m.replicas > 1
                or m.coordinated
                or m.sharing is not None
            )
        ),
    ),
    (
        "a sampler's pipeline gives one output a unit (service.md)",
        ("feed",),
        lambda p, m: m.feed is not None and _not_fed(p),
    ),
    (
        "a sampler reads by index (service.md)",
        ("feed", "index"),
        lambda p, m: m.feed is not None and any(source.kind not in INDEXABLE for source in p.sources),
    ),
    (
        "ranks that cache what they got do not wait for one that has not (operators.md)",
        ("cache",),
        lambda p, m: m.ranks > 1 and m.feed is None and any(step.name == "cache" for step in m.after),
    ),
    (
        "what comes from workers is not read by index (operators.md)",
        ("shuffle",),
        lambda p, m: any(step.name == "shuffle" and step.arguments["size"] is None for step in m.after),
    ),
    (
        "an epoch that others read is not cut short (sharing.md)",
        ("share",),
        lambda p, m: m.sharing is not None and any(step.name == "take" for step in m.after),
    ),
    (
        "ranks with unequal numbers of outputs leave an epoch together, at its end (options.md)",
        ("uneven",),
        lambda p, m: m.ranks > 1 and m.uneven == "allow" and any(step.name == "take" for step in m.after),
    ),
    (
        "after a relaxed distribute nothing may hold elements by their order of arrival",
        ("after distribute",),
        lambda p, m: not m.in_order and m.feed is None and any(step.name in ORDER_BOUND for step in m.after),
    ),
)


def refuses_weights(pipeline: Pipeline, modes: Modes) -> bool:
    """Say whether other weights of its mix are refused in the middle of an epoch."""
    named = {step.arguments["how"] if step.name == "failing" else step.name for step in pipeline.steps}
    return bool(named & HOLDS_BACK) or (modes.sharding == "hint" and "shard" in named)


def ends_apart(modes: Modes) -> bool:
    """Say whether ranks that get equal numbers of outputs make unequal ones of them, after `distribute`."""
    unequal = WITH_RNG_OF_ROWS | {"filter", "unbatch", "rebatch", "bucket", "group", "pack"}
    return any(step.name in unequal for step in modes.after)


def refusals(pipeline: Pipeline, modes: Modes) -> list[Refusal]:
    """Return every rule that a combination breaks; none: it must work."""
    return [Refusal(rule, names) for rule, names, broken in RULES if broken(pipeline, modes)]


# Drawing


def draw_after(rng: random.Random, pipeline: Pipeline) -> Iterator[Step]:
    kind = kind_of(pipeline)
    names = ["value", "batch_map", "batch", "unbatch", "rebatch", "prefetch", "take", "skip", "enumerate", "filter"]
    names += ["cache", *rng.sample(sorted(ORDER_BOUND), 1)]
    for _ in range(rng.choice([1, 1, 2])):
        fitting = [name for name in names if kind in STEPS[name].takes]
        if not fitting:
            return
        name = rng.choice(fitting)
        step = Step(name, STEPS[name].draw(rng, pipeline))
        kind = STEPS[name].gives or kind
        yield step


DRAWING = ("noise", "filter_rng", "flat_map_rng", "batch_chance")


def _with_chance(pipeline: Pipeline, after: tuple[Step, ...], ranks: int, feed: str | None) -> tuple[Step, ...]:
    """Give some a step after `distribute` that draws random numbers. Not drawn: what else a seed gives stays the same.

    Of cases with operators there every other one gets one, of the others every eighth. A rank of several whose rows
    chance left out would wait for ranks that have stopped. Rows that a sampler's lists put together are no rows there.
    """
    if feed == "lists":
        return after
    rng = random.Random(zlib.crc32(f"{pipeline} {after}".encode()))
    if rng.random() > (0.5 if after else 0.125):
        return after
    names = [name for name in DRAWING if ranks == 1 or name not in WITH_RNG_OF_ROWS]
    made = [(*after[:at], Step(name), *after[at:]) for name in names for at in range(len(after) + 1)]
    fitting = [steps for steps in made if kind_of(pipeline, steps) is not None]
    return rng.choice(fitting) if fitting else after


def _moves_its_cut(pipeline: Pipeline, modes: Modes) -> bool:
    """Say whether a case reads from cut to cut: every third that one rank reads alone, as a service deals it.

    Not drawn: what else a seed gives stays the same. Ranks would have to move in one step; weights of a mix are not set
    where operators after the cut hold elements of the old ones.
    """
    alone = modes.ranks == modes.replicas == 1 and modes.sharing is None and modes.feed is None
    plain = modes.sharding == "dynamic" and not modes.coordinated and not modes.after and not modes.own_processes
    mixed = pipeline.join is not None and pipeline.join.name == "mix"
    if not (alone and plain) or mixed:
        return False
    return _chance(f"cut {pipeline} {modes}") < 1 / 3


def _chance(text: str) -> float:
    """Return a number that depends on the case alone, so that what else is drawn of it stays as it was."""
    return random.Random(zlib.crc32(text.encode())).random()


def _reads_a_part(pipeline: Pipeline, modes: Modes) -> bool:
    """Say whether ranks read from one worker each: every other case in which they have streams of their own.

    Not drawn: what else a seed gives stays the same.
    """
    owned = modes.uneven == "allow" and modes.ranks > 1
    return owned and _chance(f"part {pipeline} {modes}") < 0.5


def _sometimes(rng: random.Random, probability: float, values: list[Any], usual: Any) -> Any:
    return rng.choice(values) if rng.random() < probability else usual


WAYS = {"plain": 5.0, "ranks": 5.0, "coordinated": 3.0, "sharing": 3.0, "feed": 1.5, "replicas": 1.0, "off": 1.0}


def draw_way(rng: random.Random) -> str:
    return rng.choices(list(WAYS), list(WAYS.values()))[0]


def draw_modes(rng: random.Random, pipeline: Pipeline, way: str) -> Modes:
    """A case has one special way of reading, at most, and anything else with it: so their products are covered."""
    ranks = 1
    if way in ("ranks", "coordinated"):
        ranks = rng.choice([2, 2, 3])
    elif way in ("feed", "replicas"):
        ranks = rng.choice([1, 1, 2])
    ranks = _sometimes(rng, 0.3 if way == "sharing" else 0.04, [2], ranks)
    deterministic = 0.08 if way in ("sharing", "off") else 1.0 if way == "replicas" else 0.4
    order = "deterministic" if rng.random() < deterministic else "relaxed"
    sharing = rng.choice(["skip", "wait", "wait"]) if way == "sharing" else None
    streams = None
    if rng.random() < 0.3:
        streams = rng.choice([1, 2, 3, 5] if order == "deterministic" or way == "coordinated" else [1, 1, 1, 2])
    sharding = (
        "off" if way == "off" else _sometimes(rng, 0.2, ["file", "data", "file_or_data", "hint", "custom"], "dynamic")
    )
    if streams is not None and rng.random() < 0.9:
        sharding = "dynamic"
    made = Modes(
        order=order,
        ranks=ranks,
        replicas=2 if way == "replicas" else 1,
        sharding=sharding,
        guarantee=_sometimes(rng, 0.15, ["exactly_once", "at_most_once", "at_most_once", "zero_or_more"], None),
        uneven=_sometimes(rng, 0.5 if ranks > 1 else 0.1, ["pad", "allow"], "drop"),
        coordinated=way == "coordinated" or (way == "sharing" and ranks > 1 and rng.random() < 0.4),
        sharing=sharing,
        trainers=rng.choice([1, 2, 2, 3]) if sharing else 1,
        trainers_named=sharing == "wait" and rng.random() < 0.6,
        feed=(feed := rng.choice(["indices", "lists", "stateful"]) if way == "feed" else None),
        streams=streams,
        transport=_sometimes(rng, 0.2, ["lz4", "zstd"], "auto"),
        memory_bytes=_sometimes(rng, 0.2, [1 << 20, 4 << 20], None),
        max_workers=_sometimes(rng, 0.05, [1, 2], None),
        after=_with_chance(pipeline, tuple(draw_after(rng, pipeline)) if rng.random() < 0.2 else (), ranks, feed),
        own_processes=way in ("plain", "feed") and ranks == 1 and rng.random() < 0.06,
    )
    moving_cut, reach = _moves_its_cut(pipeline, made), 1 if _reads_a_part(pipeline, made) else made.reach
    made = msgspec.structs.replace(made, moving_cut=moving_cut, reach=reach)
    return msgspec.structs.replace(made, read_here=_chance(f"reads {pipeline} {made}") < 1 / 5)
