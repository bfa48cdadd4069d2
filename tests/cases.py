"""One small pipeline per operator and source: what the conformance and totality tests run."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.graph import ops, readers
from penstock.sources.saved_files import Manifest, encode_manifest, part_of, publish_manifest, write_part
from penstock.sources.tfrecord import TFRecordWriter

Make = Callable[[], ps.Dataset]


def double(x):
    return x * 2


def noisy(x, rng):
    return x, float(rng.normal())


def is_even(x):
    return x % 2 == 0


def coin(x, rng):
    return rng.random() < 0.5


def children(x):
    return [(x, i) for i in range(x % 4)]


def lazy_children(x, rng):
    for i in range(x % 3):
        yield x, i, int(rng.integers(1000))


def sequence(x):
    return np.arange(x % 7 + 1, dtype=np.int32) + x


def joined(rows):
    return {"values": np.concatenate(rows), "lengths": np.array([len(row) for row in rows])}


def record(x):
    return {"id": x, "tokens": np.arange(x % 5 + 1), "name": f"n{x}", "skip": None}


def clicks(x):
    return {"id": x, "file": x // 9, "tokens": np.arange(x % 5), "price": np.float32(x)}


def image(x):
    return {"pixels": np.full((40, 40, 3), x % 256, np.uint8), "label": x}


def length_of(x):
    return len(x)


def sum_each(xs):
    return [x + 100 for x in xs]


def noisy_each(xs, rng):
    return [(x, int(rng.integers(10_000))) for x in xs]


def split_numbers(split):
    yield from range(split * 10, split * 10 + split)


class MapStyle:
    def __len__(self):
        return 23

    def __getitem__(self, i):
        return {"i": i, "row": np.full(3, i)}


def _fail_on_seven(x):
    if x % 7 == 0:
        raise ValueError(f"bad {x}")
    return x


def operator_cases(folder: Path) -> dict[str, tuple[type, Make]]:
    """Return name → (operator the case is for, pipeline). Every operator has at least one."""
    skip = ps.SkipErrors(budget=100, quarantine=str(folder / "bad.jsonl"))
    return {
        "map": (ops.Map, lambda: ps.range(40).map(double, threads=2)),
        "map_rng": (ops.Map, lambda: ps.range(40).map(noisy, threads=2)),
        "map_batched": (ops.Map, lambda: ps.range(40).map(sum_each, batch_size=7, threads=2)),
        "map_batched_rng": (ops.Map, lambda: ps.range(40).map(noisy_each, batch_size=7).map(noisy)),
        "map_skip": (ops.Map, lambda: ps.range(40).map(_fail_on_seven, on_error=skip, threads=2)),
        "filter": (ops.Filter, lambda: ps.range(40).filter(is_even, threads=2)),
        "filter_rng": (ops.Filter, lambda: ps.range(40).filter(coin).map(noisy)),
        "filter_expression": (ops.Filter, lambda: ps.range(40).map(record).filter(ps.col("id") > 20)),
        "flat_map": (ops.FlatMap, lambda: ps.range(20).flat_map(children)),
        "flat_map_rng": (ops.FlatMap, lambda: ps.range(20).flat_map(lazy_children).map(noisy)),
        "interleave": (ops.Interleave, lambda: ps.range(20).interleave(children, cycle=3, block=2)),
        "interleave_rng": (ops.Interleave, lambda: ps.range(20).interleave(lazy_children, cycle=4).map(noisy)),
        "shuffle_permutation": (ops.Shuffle, lambda: ps.range(40).shuffle(seed=3).map(noisy)),
        "shuffle_blocks": (ops.Shuffle, lambda: ps.range(40).flat_map(children).shuffle(8, seed=3).map(noisy)),
        "shuffle_after_map": (ops.Shuffle, lambda: ps.range(40).take(33).map(noisy, threads=2).shuffle(8)),
        "batch": (ops.Batch, lambda: ps.range(40).batch(7)),
        "batch_then_rng": (ops.Batch, lambda: ps.range(40).batch(7, drop_last=True).map(noisy)),
        "holdout": (ops.Holdout, lambda: ps.range(90).holdout(0.3, seed=2)[0].shuffle(8, seed=1).map(noisy)),
        "holdout_of_children": (ops.Holdout, lambda: ps.range(60).flat_map(children).holdout(0.5)[1]),
        "batch_collated": (ops.Batch, lambda: ps.range(40).map(sequence).batch(6, collate=joined).map(noisy)),
        "batch_masked": (ops.Batch, lambda: ps.range(40).map(record).map(_fixed).batch(6, mask="mask")),
        "padded_batch": (ops.PaddedBatch, lambda: ps.range(40).map(sequence).padded_batch(6, value=-1)),
        "ragged_batch": (ops.RaggedBatch, lambda: ps.range(40).map(sequence).ragged_batch(6)),
        "unbatch": (ops.Unbatch, lambda: ps.range(40).map(record).map(_fixed).batch(6).unbatch().map(noisy)),
        "rebatch": (ops.Rebatch, lambda: ps.range(40).map(image).batch(7).rebatch(5).map(noisy)),
        "select": (ops.Select, lambda: ps.range(20).map(record).select("id", "name")),
        "drop": (ops.Drop, lambda: ps.range(20).map(record).drop("tokens")),
        "rename": (ops.Rename, lambda: ps.range(20).map(record).rename({"id": "key"})),
        "repeat": (ops.Repeat, lambda: ps.range(12).shuffle(seed=1).map(noisy).repeat(3)),
        "repeat_for_ever": (ops.Repeat, lambda: ps.range(12).shuffle(seed=1).repeat().take(50)),
        "transform_features": (
            ops.TransformFeatures,
            lambda: (
                ps.range(40)
                .map(clicks)
                .ragged_batch(3)
                .transform_features(
                    ps.transforms.FirstX("tokens", out="first", x=2),
                    ps.transforms.SigridHash("first", out="hashed", salt=3, max_value=100),
                    ps.transforms.Bucketize("price", out="bucket", borders=(3.0, 20.0)),
                    ps.transforms.Sampling("file", "id", rate=0.3),
                )
            ),
        ),
        "take": (ops.Take, lambda: ps.range(40).take(11)),
        "skip": (ops.Skip, lambda: ps.range(40).filter(is_even).skip(5)),
        "enumerate": (ops.Enumerate, lambda: ps.range(10, 30).enumerate(5)),
        "zip": (ops.Zip, lambda: ps.range(40).filter(is_even).zip(ps.range(15).map(noisy))),
        "concatenate": (ops.Concatenate, lambda: ps.range(10).concatenate(ps.range(5), ps.range(7)).map(noisy)),
        "mix": (ops.Mix, lambda: ps.mix([ps.range(30), ps.range(100, 140)], [2, 1]).map(noisy)),
        "mix_all": (ops.Mix, lambda: ps.mix([ps.range(8), ps.range(100, 140)], [3, 1], stop="all")),
        "mix_units": (
            ops.Mix,
            lambda: ps.mix([ps.range(9).map(sequence), ps.range(30).map(sequence)], unit=length_of, stop="never").take(
                60
            ),
        ),
        "bucket_by_length": (
            ops.BucketByLength,
            lambda: ps.range(60).map(sequence).bucket_by_length(length_of, boundaries=[2, 4], batch_size=[5, 4, 3]),
        ),
        "group_by_window": (
            ops.GroupByWindow,
            lambda: ps.range(60).map(noisy).group_by_window(lambda x: x[0] % 5, size=4),
        ),
        "pack": (ops.Pack, lambda: ps.range(60).map(sequence).pack(10, lookahead=13).map(_with_noise)),
        "cache": (ops.Cache, lambda: ps.range(20).map(noisy).cache().map(noisy).repeat(2)),
        "cache_files": (ops.Cache, lambda: ps.range(20).map(image).cache(folder / "cache").map(_with_noise).repeat(2)),
        "autocache": (
            ops.Autocache,
            lambda: (
                ps.range(40)
                .shuffle(seed=3)
                .map(image)
                .autocache(folder / "kept", always=True)
                .map(_with_noise)
                .batch(3)
            ),
        ),
        "autocache_splits": (
            ops.Autocache,
            lambda: (
                ps.from_generator(split_numbers, splits=range(9))
                .filter(is_even)
                .map(noisy)
                .autocache(folder / "kept", always=True, frozen=True, version="1")
                .map(noisy)
                .shuffle(7, seed=4)
            ),
        ),
        "prefetch": (ops.Prefetch, lambda: ps.range(40).map(double).prefetch(5)),
        "shard": (ops.Shard, lambda: ps.range(40).map(double).shard().shuffle(seed=3).map(noisy)),
        "with_length": (ops.WithLength, lambda: ps.range(40).filter(is_even).with_length(20)),
        "with_epoch": (ops.WithEpoch, lambda: ps.range(12).shuffle(seed=5).with_epoch(30)),
        "identified": (
            ops.Identified,
            lambda: ps.Dataset(ops.Identified(upstream=ps.range(40).shuffle(8, seed=3).flat_map(children).node)),
        ),
        "fused": (
            ops.Fused,
            lambda: ps.range(40).map(double, threads=2).map(noisy, threads=2).filter(_short, threads=2),
        ),
        "fused_batch": (ops.FusedBatch, lambda: ps.range(40).map(image, threads=2).batch(6)),
        "six_operators": (
            ops.Shuffle,
            lambda: ps.range(200).filter(is_even).shuffle(16, seed=2).map(noisy).flat_map(_twice).batch(9).enumerate(),
        ),
    }


def _fixed(row):
    return {"id": row["id"], "name": row["name"], "pair": np.full(2, row["id"])}


def _short(x):
    return x[1] < 1.0


def _with_noise(row, rng):
    return {**row, "noise": float(rng.random())}


def _twice(x):
    return [x, x]


def features_table(folder: Path) -> ps.Table:
    """Return a table of three days, made when it is first asked for."""
    from tests.warehouse.tables import small_table

    return ps.Table(folder / "features") if (folder / "features").exists() else small_table(folder / "features")


def source_cases(folder: Path) -> dict[str, tuple[type, Make]]:
    """Return name → (source the case is for, pipeline); the files are made below `folder`."""
    rng = np.random.default_rng(0)
    for n in range(3):
        with TFRecordWriter(str(folder / f"{n}.tfrecord")) as writer:
            for i in range(7):
                writer.write(f"record {n} {i}".encode() * i)
        (folder / f"{n}.txt").write_text("".join(f"line {n} {i}\n" for i in range(8)))
        with gzip.open(folder / f"{n}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"n": n, "i": i}) + "\n" for i in range(6))
        (folder / f"{n}.csv").write_text("a,b\n" + "".join(f"{i},x{i}\n" for i in range(6)))
        np.save(folder / f"{n}.npy", rng.integers(0, 100, (5, 2)))
        table = pa.table({"a": list(range(n * 10, n * 10 + 10)), "b": [[i] * (i % 3) for i in range(10)]})
        pq.write_table(table, folder / f"{n}.parquet", row_group_size=4)
        with pa.OSFile(str(folder / f"{n}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table, max_chunksize=4)
        with tarfile.open(folder / f"{n}.tar", "w") as tar:
            for i in range(5):
                for extension in ("txt", "cls"):
                    data = f"{n} {i} {extension}".encode()
                    info = tarfile.TarInfo(f"{n}{i:03d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (folder / "images" / f"class{n}").mkdir(parents=True, exist_ok=True)
        for i in range(4):
            (folder / "images" / f"class{n}" / f"{i}.jpg").write_bytes(bytes([n, i]) * 10)

    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    parts = [part_of(write_part(str(saved), list(map(record, range(i, i + 5))))) for i in range(0, 20, 5)]
    publish_manifest(str(saved), encode_manifest(Manifest(parts=parts, complete=True)))

    def huggingface() -> ps.Dataset:
        import datasets

        return ps.from_huggingface(datasets.Dataset.from_dict({"a": list(range(15)), "b": [str(i) for i in range(15)]}))

    plain: dict[str, tuple[type, Make]] = {
        "range": (readers.Range, lambda: ps.range(0, 60, 2)),
        "from_items": (readers.FromItems, lambda: ps.from_items([{"x": i} for i in range(20)])),
        "from_generator": (readers.FromGenerator, lambda: ps.from_generator(split_numbers, splits=[3, 0, 4, 5])),
        "from_torch": (readers.FromTorch, lambda: ps.from_torch(MapStyle())),
        "from_huggingface": (readers.FromHuggingface, huggingface),
        "read_tfrecord": (readers.ReadTFRecord, lambda: ps.read_tfrecord(folder / "*.tfrecord")),
        "read_text": (readers.ReadText, lambda: ps.read_text(folder / "*.txt")),
        "read_jsonl": (readers.ReadJsonl, lambda: ps.read_jsonl(folder / "*.jsonl.gz")),
        "read_csv": (readers.ReadCsv, lambda: ps.read_csv(folder / "{0..2}.csv")),
        "read_webdataset": (readers.ReadWebdataset, lambda: ps.read_webdataset(folder / "*.tar")),
        "read_files": (readers.ReadFiles, lambda: ps.read_files(folder / "*.{txt,csv}")),
        "read_images": (readers.ReadImages, lambda: ps.read_images(folder / "images")),
        "read_numpy": (readers.ReadNumpy, lambda: ps.read_numpy(folder / "*.npy")),
        "read_parquet": (readers.ReadParquet, lambda: ps.read_parquet(folder / "*.parquet")),
        "read_parquet_batches": (readers.ReadParquet, lambda: ps.read_parquet(folder / "*.parquet", batch=3)),
        "read_arrow": (readers.ReadArrow, lambda: ps.read_arrow(folder / "*.arrow")),
        "read_saved": (readers.ReadSaved, lambda: ps.read_saved(saved)),
        "read_features": (readers.ReadFeatures, lambda: ps.read_features(features_table(folder), batch=3)),
        "read_features_of_some_rows": (
            readers.ReadFeatures,
            lambda: ps.read_features(
                features_table(folder), batch=3, where=ps.col("label") == 0, sample=0.8, columns=["key"]
            ),
        ),
    }
    shuffled = {
        f"{name}_shuffled": (kind, lambda make=make: make().shuffle(6, seed=4).enumerate().map(noisy))
        for name, (kind, make) in plain.items()
    }
    return {**plain, **shuffled}


OPERATOR_NAMES = tuple(operator_cases(Path("unused")))
"""For parametrization: making the pipelines' closures touches no file."""
SOURCE_NAMES = tuple(
    name + suffix
    for suffix in ("", "_shuffled")
    for name in (
        "range",
        "from_items",
        "from_generator",
        "from_torch",
        "from_huggingface",
        "read_tfrecord",
        "read_text",
        "read_jsonl",
        "read_csv",
        "read_webdataset",
        "read_files",
        "read_images",
        "read_numpy",
        "read_parquet",
        "read_parquet_batches",
        "read_arrow",
        "read_saved",
        "read_features",
        "read_features_of_some_rows",
    )
)
