"""A disk that is full: the error names the operator and the path, and leaves nothing half written behind."""

import subprocess
import sys
import textwrap

import pytest

import penstock as ps
from penstock.core.errors import CannotWriteError

CACHES_TOO_MUCH = """
    import resource, sys
    import numpy as np
    import penstock as ps
    from penstock.core.errors import CannotWriteError

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        list(ps.range(100).map(lambda x: np.zeros(5000)).cache(sys.argv[1]))
    except CannotWriteError as error:
        assert isinstance(error, OSError) and error.errno is not None
        print(error)
"""


def test_a_cache_that_cannot_be_written_names_its_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CACHES_TOO_MUCH), tmp_path / "cache"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("cache() cannot write ") and str(tmp_path / "cache") in done.stdout
    assert "another path" in done.stdout
    assert list((tmp_path / "cache").iterdir()) == [], "what was written of it is gone"


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWriteError, match=r"cache\(\) cannot write .*file/cache"):
        list(ps.range(3).cache(tmp_path / "file" / "cache"))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_quarantine_that_cannot_be_written_is_named_with_its_operator(threads):
    def picky(x):
        raise ValueError(x)

    skip = ps.SkipErrors(budget=10, quarantine="/dev/full")
    with pytest.raises(CannotWriteError, match=r"map\(picky\) cannot write /dev/full: No space left.*quarantine="):
        list(ps.range(3).map(picky, on_error=skip).iterator(threads=threads))


def test_a_quarantine_that_cannot_be_written_is_named_by_a_reader(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a":\n')
    skip = ps.SkipErrors(budget=10, quarantine="/dev/full")
    with pytest.raises(CannotWriteError, match=r"read_jsonl cannot write /dev/full"):
        list(ps.read_jsonl(tmp_path / "bad.jsonl", on_error=skip))
