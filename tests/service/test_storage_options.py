"""What a reader was given for its storage reaches the processes that read, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

DEADLINE_S = 45.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A storage that opens only for who knows the word in its name."""
    made = tmp_path / "hush-hush"
    made.mkdir()
    for number in range(20):
        (made / f"{number:02d}.txt").write_text("".join(f"{number * 10 + i}\n" for i in range(10)))
    return made


def options(folder: Path) -> dict[str, Any]:
    return {"path": str(folder), "target_protocol": "file", "target_options": {"auto_mkdir": False}}


def test_workers_read_with_the_trainers_options(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    dataset = ps.read_text("dir://*.txt", storage_options=options(folder)).map(int).batch(10)
    with ps.LocalService(workers=2, inline=1, journal=tmp_path / "journal") as service:
        loader = dataset.distribute(service, limits=ps.Limits(timeout_s=DEADLINE_S))
        for _ in range(2):
            assert sorted(number for batch in loader for number in batch.tolist()) == list(range(200))
        state = loader.state_dict()
        said = f"{loader.explain()} {loader!r} {state} {service.jobs()} {loader._sources[0].backend.prepared}"
    stored = b"".join(path.read_bytes() for path in (tmp_path / "journal").rglob("*") if path.is_file())
    assert len(stored) > 1000
    assert b"hush-hush" not in stored
    assert "hush-hush" not in said
    assert not [each for each in caplog.records if each.name.startswith("penstock") and "hush" in each.getMessage()]


def test_two_sources_have_their_own_options(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "00.txt").write_text("".join(f"{i}\n" for i in range(1000, 1100)))
    first, second = (ps.read_text("dir://*.txt", storage_options=options(each)) for each in (folder, other))
    with ps.mix([first, second], stop="all").map(int).distribute(1, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
        assert sorted(loader) == [*range(200), *range(1000, 1100)]


def test_an_option_that_cannot_be_sent_is_named(folder: Path) -> None:
    dataset = ps.read_text("dir://*.txt", storage_options={**options(folder), "skip_instance_cache": object()})
    with (
        dataset.distribute(1, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader,
        pytest.raises(ps.InvalidArgumentError, match=r"storage_options\['skip_instance_cache'\] of read_text"),
    ):
        list(loader)
