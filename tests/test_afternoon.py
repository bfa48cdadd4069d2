"""A new user's afternoon, from the README alone: train, resume in the second epoch, mix over two ranks, a table, cells
typed one after the other, mistakes. Only what the README and its pages name is used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from tests.service.checks import Background


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    simplejpeg = pytest.importorskip("simplejpeg")
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "train" / kind).mkdir(parents=True)
        for number in range(40):
            picture = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
            (tmp_path / "train" / kind / f"{number:03}.jpg").write_bytes(simplejpeg.encode_jpeg(picture))
    return tmp_path / "train"


def augment(example, rng):
    image = ps.image.random_resized_crop(example["image"], 32, rng)
    return {"image": ps.image.normalize(ps.image.flip(image, rng)), "label": example["label"]}


def test_training_that_is_stopped_in_its_second_epoch_goes_on_as_if_it_had_not_been(photos: Path) -> None:
    train = ps.read_images(photos).shuffle(seed=7).map(augment).batch(16, drop_last=True)
    assert len(train) == 5

    def losses(loader, epochs, stop=None):
        seen = []
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                seen.append((float(batch["image"].sum()), batch["label"].tolist()))
                if (epoch, step) == stop:
                    return seen
        return seen

    with train.distribute(2, order="deterministic") as loader:
        whole = losses(loader, 3)
    with train.distribute(2, order="deterministic") as loader:
        before = losses(loader, 3, stop=(1, 2))
        saved = json.dumps(loader.state_dict())
    with train.distribute(1, order="deterministic") as loader:
        loader.load_state_dict(json.loads(saved))
        after = losses(loader, 2)
    assert before + after == whole


def test_two_ranks_read_a_mixture_of_two_corpora_packed(tmp_path: Path) -> None:
    for corpus, documents in (("web", 120), ("code", 60)):
        for part in range(3):
            lines = [json.dumps({"text": f"{corpus} " * (3 + number % 30)}) for number in range(documents // 3)]
            (tmp_path / f"{corpus}-{part}.jsonl").write_text("\n".join(lines))

    def tokens(example):
        return {"tokens": np.array([len(word) for word in example["text"].split()], np.int32)}

    corpora = [ps.read_jsonl(str(tmp_path / f"{name}-*.jsonl")).shuffle(100, seed=1) for name in ("web", "code")]
    rows = ps.mix(corpora, weights=[2, 1], stop="all").map(tokens).pack(64, key="tokens").batch(4)
    with ps.LocalService(workers=2) as service:

        def steps(rank):
            with rows.distribute(service, job="language model", ranks=ps.Ranks(2, rank)) as loader:
                return [batch["tokens"].shape for batch in loader]

        first, second = [Background(lambda rank=rank: steps(rank)) for rank in range(2)]
        assert len(first.result(60)) == len(second.result(60)) > 3


def test_a_table_is_filtered_and_its_columns_chosen(tmp_path: Path) -> None:
    table = pa.table(
        {"id": np.arange(7000), "day": np.arange(7000) % 7, "tags": [list(range(i % 4)) for i in range(7000)]}
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=500)
    tuesday = ps.read_parquet(tmp_path / "t.parquet").filter(ps.col("day") == 2).select("id").batch(100)
    assert sum(len(batch["id"]) for batch in tuesday) == 1000
    batch = next(iter(ps.read_parquet(tmp_path / "t.parquet", batch=512)))
    assert isinstance(batch["tags"], ps.Ragged)


def test_functions_typed_into_cells_run_in_worker_processes_and_may_be_typed_again() -> None:
    cells = """
        import penstock as ps, numpy as np
        SCALE = 3
        def scale(x):
            return {"y": np.float32(x * SCALE)}

        loader = ps.range(100).map(scale).batch(10).distribute(2)
        print(sum(float(batch["y"].sum()) for batch in loader))
        SCALE = 4
        with ps.range(100).map(scale).batch(10).distribute(2) as again:
            print(sum(float(batch["y"].sum()) for batch in again))

        loader.close()
    """
    typed = textwrap.dedent(cells)
    shell = subprocess.run([sys.executable, "-i", "-q"], input=typed, capture_output=True, text=True, timeout=60)
    assert shell.stdout.split() == ["14850.0", "19800.0"], shell.stderr


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda folder: list(ps.read_parquet(folder / "t.parquet").select("idd")), "no column 'idd'; there are id"),
        (lambda folder: list(ps.read_jsonl(str(folder / "nothing-*.jsonl"))), "nothing-"),
        (lambda folder: ps.range(3).distribute("localhost:5050"), "tcp://localhost:5050"),
        (lambda folder: ps.range(3).distribute(1, ranks=ps.Ranks(2, 2)), "they are 0 to 1"),
        (lambda folder: list(ps.range(3).map(lambda x: None).batch(2)), "ends without `return`"),
        (lambda folder: list(ps.read_jsonl(str(folder / "bad.jsonl"))), "bad.jsonl at byte 9"),
    ],
    ids=["a column", "a pattern", "an address", "a rank", "no return", "a line"],
)
def test_a_mistake_is_told_with_its_place_and_the_remedy(tmp_path: Path, mistake, said: str) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "t.parquet")
    (tmp_path / "bad.jsonl").write_text('{"id":1}\n{"id":2\n{"id":3}\n')
    with pytest.raises(ps.PenstockError) as caught:
        mistake(tmp_path)
    assert said in str(caught.value)
