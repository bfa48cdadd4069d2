"""One pipeline per operator and the plan it runs as: what every operator looks like after all passes."""

from __future__ import annotations

import penstock as ps
from penstock.graph import ops


def f(x):
    return x + 1


def g(x):
    return x * 2


def noisy(x, rng):
    return x + rng.random()


def keep(x):
    return x % 2 == 0


def children(x):
    return [x, x]


def length(x):
    return len(x)


class Identity:
    def __call__(self, x):
        return x


def parquet(**options):
    return ps.read_parquet("t.parquet", **options)


def csv(**options):
    return ps.read_csv("t.csv", **options)


col = ps.col
skip = ps.SkipErrors(budget=3)

GOLDEN_PLANS: dict[str, tuple[ps.Dataset, str]] = {
    "map": (
        ps.range(9).map(f),
        """
        range(0, 9)
        map(f)
        prefetch()
        """,
    ),
    "filter": (
        ps.range(9).filter(keep),
        """
        range(0, 9)
        filter(keep)
        prefetch()
        """,
    ),
    "flat_map": (
        ps.range(9).map(f).flat_map(children).map(g),
        """
        range(0, 9)
        map(f)
        flat_map(children)
        map(g)
        prefetch()
        """,
    ),
    "interleave": (
        ps.range(9).interleave(children, cycle=2).filter(keep).map(g),
        """
        range(0, 9)
        interleave(children, cycle=2)
        fused: filter(keep) + map(g)
        prefetch()
        """,
    ),
    "shuffle": (
        ps.range(9).shuffle(2).map(f).shuffle(4, seed=1).map(g).shuffle(3, seed=2).map(noisy),
        """
        range(0, 9)
        shuffle(size=4, seed=2)
        fused: map(f) + map(g) + map(noisy, rng)
        prefetch()
        """,
    ),
    "batch": (
        ps.range(9).batch(4, drop_last=True),
        """
        range(0, 9)
        batch(4, drop_last=True)
        prefetch()
        """,
    ),
    "holdout": (
        ps.range(9).map(f).holdout(0.25, seed=3)[1].map(g),
        """
        range(0, 9)
        fused: map(f) + holdout(0.25, 3, 'held out') + map(g)
        prefetch()
        """,
    ),
    "batch_collated": (
        ps.range(9).map(f).batch(4, collate=g),
        """
        range(0, 9)
        map(f)
        batch(4, collate=g)
        prefetch()
        """,
    ),
    "padded_batch": (
        ps.range(9).map(f).map(g).padded_batch(4),
        """
        range(0, 9)
        fused: map(f) + map(g)
        padded_batch(4)
        prefetch()
        """,
    ),
    "ragged_batch": (
        ps.range(9).map(f).ragged_batch(4),
        """
        range(0, 9)
        map(f)
        ragged_batch(4)
        prefetch()
        """,
    ),
    "unbatch": (
        ps.range(9).batch(4).map(f).unbatch().map(g).shuffle(3),
        """
        range(0, 9)
        batch(4)
        map(f)
        unbatch()
        shuffle(size=3)
        map(g)
        prefetch()
        """,
    ),
    "rebatch": (
        ps.range(9).batch(4).rebatch(4),
        """
        range(0, 9)
        batch(4)
        rebatch(4)
        prefetch()
        """,
    ),
    "select": (
        ps.read_parquet("t.parquet").filter(ps.col("c") > 1).shuffle(8).select("b", "a"),
        """
        read_parquet('t.parquet', columns=('b', 'a'), predicate=col('c') > 1)
        shuffle(size=8)
        prefetch()
        """,
    ),
    "drop": (
        ps.read_parquet("t.parquet", columns=["a", "b", "c"]).drop("b"),
        """
        read_parquet('t.parquet', columns=('a', 'c'))
        prefetch()
        """,
    ),
    "rename": (
        ps.read_csv("t.csv").rename({"a": "x"}).select("y").rename({"y": "y"}),
        """
        read_csv('t.csv', columns=('y', 'a'))
        fused: rename(('a', 'x')) + select('y')
        prefetch()
        """,
    ),
    "repeat": (
        ps.range(9).repeat(1).map(f).repeat(3),
        """
        range(0, 9)
        map(f)
        repeat(count=3)
        prefetch()
        """,
    ),
    "transform_features": (
        ps.read_parquet("t.parquet", batch=9)
        .transform_features(
            ps.transforms.FirstX("a", out="x", x=2),
            ps.transforms.SigridHash("x", out="h", max_value=9),
            ps.transforms.Clamp("b", out="y", low=0, high=1),
        )
        .filter(ps.col("c") > 1)
        .select("h"),
        """
        read_parquet('t.parquet', columns='a', predicate=col('c') > 1, batch=9)
        fused: transform_features((x = FirstX(a), h = SigridHash(x))) + select('h')
        prefetch()
        """,
    ),
    "take": (
        ps.range(9).take(-1).map(f).take(5).take(7),
        """
        range(0, 9)
        map(f)
        take(5)
        prefetch()
        """,
    ),
    "skip": (
        ps.range(9).skip(0).map(f).skip(1).skip(2),
        """
        range(0, 9)
        map(f)
        skip(3)
        prefetch()
        """,
    ),
    "enumerate": (
        ps.range(9).map(f).enumerate(5),
        """
        range(0, 9)
        map(f)
        enumerate(start=5)
        prefetch()
        """,
    ),
    "zip": (
        ps.range(9).map(f).map(g).zip(ps.range(5).filter(keep).batch(2)),
        """
        ┌ range(0, 9)
        │ fused: map(f) + map(g)
        ├ range(0, 5)
        │ filter(keep)
        │ batch(2)
        zip()
        prefetch()
        """,
    ),
    "concatenate": (
        ps.read_csv("a.csv").concatenate(ps.read_parquet("b.parquet")).select("x"),
        """
        ┌ read_csv('a.csv', columns='x')
        ├ read_parquet('b.parquet', columns='x')
        concatenate()
        prefetch()
        """,
    ),
    "mix": (
        ps.mix([ps.read_arrow("a.arrow"), ps.read_parquet("b.parquet")], [3, 1]).select("x"),
        """
        ┌ read_arrow('a.arrow', columns='x')
        ├ read_parquet('b.parquet', columns='x')
        mix((3, 1))
        select('x')
        prefetch()
        """,
    ),
    "bucket_by_length": (
        ps.range(9).map(f).bucket_by_length(length, boundaries=[4], batch_size=2),
        """
        range(0, 9)
        map(f)
        bucket_by_length(length, 4, (2, 2))
        prefetch()
        """,
    ),
    "group_by_window": (
        ps.range(9).map(f).group_by_window(keep, size=3).map(g),
        """
        range(0, 9)
        map(f)
        group_by_window(keep, 3)
        map(g)
        prefetch()
        """,
    ),
    "identified": (
        ps.Dataset(ops.Identified(upstream=ps.range(9).map(noisy).node, first_source=2)),
        """
        range(0, 9)
        fused: map(noisy, rng) + identified(first_source=2)
        prefetch()
        """,
    ),
    "pack": (
        ps.read_parquet("t.parquet").shuffle(8).pack(16, key="tokens"),
        """
        read_parquet('t.parquet', columns='tokens')
        shuffle(size=8)
        pack(16, key='tokens')
        prefetch()
        """,
    ),
    "cache": (
        ps.read_parquet("t.parquet").cache().select("a").map(f).map(g).batch(2),
        """
        read_parquet('t.parquet')
        cache()
        fused: select('a') + map(f) + map(g) + batch(2)
        prefetch()
        """,
    ),
    "autocache": (
        ps.read_parquet("t.parquet").map(f).map(g).batch(2).autocache("kept").select("a"),
        """
        read_parquet('t.parquet')
        fused: map(f) + map(g)
        autocache(location='kept')
        batch(2)
        select('a')
        prefetch()
        """,
    ),
    "prefetch": (
        ps.range(9).map(f).prefetch().prefetch().prefetch(3).take(2),
        """
        range(0, 9)
        map(f)
        prefetch()
        prefetch(size=3)
        take(2)
        """,
    ),
    "shard": (
        ps.range(9).map(f).shard().map(g).map(noisy).shuffle(3),
        """
        range(0, 9)
        map(f)
        shard()
        shuffle(size=3)
        fused: map(g) + map(noisy, rng)
        prefetch()
        """,
    ),
    "with_length": (
        ps.range(9).map(f).with_length(9),
        """
        range(0, 9)
        map(f)
        with_length(9)
        prefetch()
        """,
    ),
    "with_epoch": (
        ps.range(9).map(f).shuffle(3).with_epoch(4),
        """
        range(0, 9)
        shuffle(size=3)
        map(f)
        with_epoch(4)
        prefetch()
        """,
    ),
    "fused": (
        ps.range(9).map(f).filter(keep).map(g, threads=3).map(noisy, threads=3),
        """
        range(0, 9)
        fused: map(f) + filter(keep)
        fused: map(g, threads=3) + map(noisy, rng, threads=3)
        prefetch()
        """,
    ),
    "fused_batch": (
        ps.range(9).map(f).filter(keep).map(g).map(noisy).batch(4, drop_last=True).map(f),
        """
        range(0, 9)
        fused: map(f) + filter(keep)
        fused: map(g) + map(noisy, rng) + batch(4, drop_last=True)
        map(f)
        prefetch()
        """,
    ),
}
