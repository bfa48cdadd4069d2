"""A skipped element runs again exactly as it did: same element, same random numbers, in the user's own frame."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import InvalidArgumentError, ReplayError
from penstock.graph.functions import UserFunction
from penstock.runtime.quarantine import read_quarantine
from penstock.runtime.replay import replay

SCRIPT = """
import json
import pathlib
import penstock as ps
from penstock.sources.tfrecord import TFRecordWriter

folder = pathlib.Path("data")
folder.mkdir()


def skip(name):
    return ps.SkipErrors(budget=1000, quarantine=f"{name}.jsonl")


def half(x):
    return x // 2


def even(x):
    return x % 2 == 0


def children(x):
    return [x, x + 1, x + 2]


def seven(x):
    if x % 7 == 3:
        raise ValueError(f"bad {x}")
    return x


def above_ten(x):
    return seven(x) > 10


def noisy(x, rng):
    drawn = rng.random()
    if x % 7 == 4:
        raise ValueError(f"bad {x} {drawn!r}")
    return x + drawn


class Model:
    def __init__(self):
        self.limit = 30

    def __call__(self, x):
        assert x < self.limit, f"{x} is too much"
        return x


def use_row(row, rng):
    if row["i"] == 5:
        raise KeyError(f"{row} {rng.random()!r}")
    return row


def in_file_one(record):
    if record.startswith(b"1"):
        raise RuntimeError(f"{record[:5]!r}")
    return record


def bad_name(image):
    if image["path"].endswith("7.jpg"):
        raise OSError(image["path"])
    return image


for n in range(3):
    with TFRecordWriter(str(folder / f"{n}.tfrecord")) as writer:
        for i in range(20):
            writer.write(f"{n} {i:02}".encode() * 3)
    lines = [json.dumps({"n": n, "i": i}) if (n, i) not in ((1, 3), (1, 4), (2, 7)) else "{broken" for i in range(10)]
    (folder / f"{n}.jsonl").write_text("\\n".join(lines) + "\\n")
    (folder / "images" / f"class{n}").mkdir(parents=True)
    for i in range(13):
        (folder / "images" / f"class{n}" / f"{i}.jpg").write_bytes(bytes([n, i]))
content = bytearray((folder / "1.tfrecord").read_bytes())
for number in (5, 9):
    content[number * len(content) // 20 + 14] ^= 255
(folder / "1.tfrecord").write_bytes(content)

numbers = ps.range(60)
tfrecords, rows, images = folder / "*.tfrecord", folder / "*.jsonl", folder / "images"
shared = numbers.map(noisy, on_error=skip("shared"))
pipelines = {
    "map": numbers.map(seven, on_error=skip("map")),
    "filter": numbers.filter(above_ten, on_error=skip("filter")),
    "class": numbers.map(Model, on_error=skip("class")),
    "rng": numbers.map(noisy, on_error=skip("rng")),
    "after_permutation": numbers.shuffle(seed=3).map(noisy, on_error=skip("after_permutation")),
    "before_permutation": numbers.map(noisy, on_error=skip("before_permutation")).shuffle(seed=3),
    "after_blocks": numbers.flat_map(children).shuffle(16).map(noisy, on_error=skip("after_blocks")),
    "before_blocks": numbers.flat_map(children).map(noisy, on_error=skip("before_blocks")).shuffle(16),
    "fused": numbers.map(half).filter(even).map(noisy, on_error=skip("fused")).map(str).batch(4),
    "twice": numbers.map(seven, on_error=skip("twice")).map(half).map(noisy, on_error=skip("twice")),
    "repeat": numbers.shuffle(seed=1).map(noisy, on_error=skip("repeat")).repeat(3),
    "with_epoch": numbers.shuffle(seed=1).map(noisy, on_error=skip("with_epoch")).with_epoch(70),
    "second_input": numbers.zip(numbers.filter(even).shuffle(5).map(noisy, on_error=skip("second_input"))),
    "shared": shared.shuffle(seed=9).zip(shared),
    "tfrecord": ps.read_tfrecord(tfrecords, on_error=skip("tfrecord")),
    "tfrecord_map": ps.read_tfrecord(tfrecords, on_error=skip("x")).map(in_file_one, on_error=skip("tfrecord_map")),
    "jsonl": ps.read_jsonl(rows, on_error=skip("jsonl")).shuffle(8, seed=2),
    "jsonl_map": ps.read_jsonl(rows, on_error=skip("x")).map(use_row, on_error=skip("jsonl_map")).shuffle(8, seed=2),
    "images": ps.read_images(images).shuffle(seed=2).map(bad_name, on_error=skip("images")),
}
if __name__ == "__main__":
    for name, dataset in pipelines.items():
        with dataset.iterator(epoch=2, threads=2) as iterator:
            for _ in iterator:
                pass
"""

LEAST = {"fused": 3, "second_input": 3, "tfrecord": 2, "jsonl": 3, "jsonl_map": 3, "images": 3}
NAMES = (
    *("map", "filter", "class", "rng", "after_permutation", "before_permutation", "after_blocks", "before_blocks"),
    *("fused", "twice", "repeat", "with_epoch", "second_input", "shared", "tfrecord", "tfrecord_map"),
    *("jsonl", "jsonl_map", "images"),
)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory) -> Path:
    """Return the folder in which a script of its own process has skipped elements of many pipelines."""
    folder = tmp_path_factory.mktemp("skipped")
    (folder / "training.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "training.py"], cwd=folder, check=True, timeout=60)
    return folder


def penstock(*arguments: str, cwd: Path, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from penstock.cli.main import main; sys.exit(main())", *arguments]
    return subprocess.run(
        command, cwd=cwd, input=given, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def first_id(file: Path) -> str:
    return next(iter(read_quarantine(file)))


@pytest.mark.parametrize("name", NAMES)
def test_every_skipped_element_fails_again_with_the_same_message(skipped, name, monkeypatch):
    monkeypatch.chdir(skipped)
    entries = read_quarantine(skipped / f"{name}.jsonl")
    assert len(entries) >= LEAST.get(name, 8)
    for entry in entries.values():
        error = replay(entry).error
        assert error is not None, entry
        found = f"{type(error).__module__}.{type(error).__qualname__}", str(error)
        assert found == (entry.exception, entry.message), entry


def test_both_operators_of_a_chain_have_entries(skipped):
    operators = {entry.operator for entry in read_quarantine(skipped / "twice.jsonl").values()}
    assert operators == {"map(seven)", "map(noisy)"}


def test_replaying_writes_nothing(skipped, monkeypatch):
    monkeypatch.chdir(skipped)
    before = {file.name: file.read_bytes() for file in skipped.glob("*.jsonl")}
    for entry in list(read_quarantine("tfrecord_map.jsonl").values())[:3]:
        replay(entry)
    assert {file.name: file.read_bytes() for file in skipped.glob("*.jsonl")} == before


def test_origins_name_the_file_even_where_small_files_share_a_split(skipped):
    rows = [entry.origin for entry in read_quarantine(skipped / "jsonl_map.jsonl").values()]
    assert sorted(origin.path.rpartition("/")[2] for origin in rows) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    images = [entry.origin for entry in read_quarantine(skipped / "images.jsonl").values()]
    assert all(origin.path.endswith("/7.jpg") for origin in images)


def test_the_command_lists_what_was_skipped(skipped):
    listed = penstock("replay", "rng.jsonl", cwd=skipped)
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith(first_id(skipped / "rng.jsonl"))
    assert "map(noisy)" in lines[0] and "element 4 of split 0" in lines[0] and "ValueError: bad 4 0." in lines[0]


def test_a_function_of_a_main_script_fails_again_with_its_own_traceback(skipped, tmp_path):
    file = skipped / "rng.jsonl"
    again = penstock("replay", str(file), first_id(file), cwd=tmp_path)  # from another folder
    assert again.returncode == 1
    assert "called with 4" in again.stdout
    assert 'training.py", line' in again.stderr and "ValueError: bad 4 0." in again.stderr
    assert "penstock: in map(noisy), element 4 of split 0" in again.stderr
    assert "runtime" not in again.stderr, "our own frames are hidden"


def test_the_debugger_opens_in_the_users_frame(skipped):
    file = skipped / "after_blocks.jsonl"
    again = penstock("replay", str(file), first_id(file)[:7], "--debugger", "pdb", cwd=skipped, given="p x % 7\nq\n")
    assert again.returncode == 1
    assert "training.py(" in again.stdout and "noisy()" in again.stdout
    assert "(Pdb) 4" in again.stdout


def test_breakpoints_in_the_function_work(tmp_path):
    script = """
import penstock as ps

def stop(x):
    breakpoint()
    raise ValueError(x)

if __name__ == "__main__":
    import sys
    sys.breakpointhook = lambda *given: None
    list(ps.range(5).map(stop, on_error=ps.SkipErrors(budget=9, quarantine="bad.jsonl")))
"""
    (tmp_path / "script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=60)
    id_ = list(read_quarantine(tmp_path / "bad.jsonl"))[3]
    again = penstock("replay", "bad.jsonl", id_, cwd=tmp_path, given="p x * 1000\nc\n")
    assert again.returncode == 1
    assert "(Pdb) 3000" in again.stdout and "ValueError: 3" in again.stderr
    left = penstock("replay", "bad.jsonl", id_, cwd=tmp_path, given="q\n")
    assert left.returncode == 1
    assert "Traceback" not in left.stderr


def test_a_function_mended_in_its_package_does_not_fail_any_more(tmp_path):
    package = tmp_path / "site-packages" / "decoders.py"  # installed code goes by reference
    package.parent.mkdir()
    package.write_text("def decode(x):\n    return {'value': 10 // (x - 3)}\n")
    script = """
import decoders
import penstock as ps
list(ps.range(5).map(decoders.decode, on_error=ps.SkipErrors(budget=9, quarantine="bad.jsonl")))
"""
    (tmp_path / "script.py").write_text(script)
    paths = {"PYTHONPATH": os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=60, env={**os.environ, **paths})
    (id_,) = read_quarantine(tmp_path / "bad.jsonl")
    assert penstock("replay", "bad.jsonl", id_, cwd=tmp_path, **paths).returncode == 1
    package.write_text("def decode(x):\n    return {'value': 10 // max(x - 3, 1)}\n")
    mended = penstock("replay", "bad.jsonl", id_, cwd=tmp_path, **paths)
    assert mended.returncode == 0, mended.stderr
    assert "does not fail any more; the result is {'value': 10}" in mended.stdout


def test_a_fix_can_be_tried_in_place_of_the_stored_function(skipped, tmp_path):
    (tmp_path / "fix.py").write_text("def noisy(x, rng):\n    return x, rng.random()\n")
    file = skipped / "rng.jsonl"
    tried = penstock("replay", str(file), first_id(file), "--function", "fix.py:noisy", cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr
    drawn = read_quarantine(file)[first_id(file)].message.split()[-1]
    assert f"the result is (4, {drawn})" in tried.stdout


def test_a_source_fails_again_naming_file_and_offset(skipped):
    file = skipped / "tfrecord.jsonl"
    again = penstock("replay", str(file), list(read_quarantine(file))[1], "--debugger", "pdb", cwd=skipped)
    assert again.returncode == 1
    assert "1.tfrecord at byte" in again.stderr and "checksum" in again.stderr
    assert "File " not in again.stderr and "(Pdb)" not in again.stdout, "nothing of it is the user's code"


def test_a_mended_file_is_read_again(tmp_path, monkeypatch):
    import penstock as ps

    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"x": 1}\n{"x": \n{"x": 3}\n')
    assert len(list(ps.read_jsonl("a.jsonl", on_error=ps.SkipErrors(budget=1, quarantine="q.jsonl")))) == 2
    (entry,) = read_quarantine("q.jsonl").values()
    assert "a.jsonl at byte 9" in str(replay(entry).error)
    Path("a.jsonl").write_text('{"x": 1}\n{"x": 2}\n{"x": 3}\n')
    assert replay(entry).result == {"x": 2}


def test_data_that_changed_is_said_to_have_changed(tmp_path, monkeypatch):
    import penstock as ps

    def fail(row):
        raise ValueError(row)

    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("1\n2\n3\n")
    list(ps.read_jsonl("a.jsonl").map(fail, on_error=ps.SkipErrors(budget=9, quarantine="q.jsonl")))
    *_, last = read_quarantine("q.jsonl").values()
    Path("a.jsonl").write_text("1\n")
    with pytest.raises(ReplayError, match="has changed"):
        replay(last)


def test_a_replacement_may_not_ask_for_random_numbers_that_there_were_none_of(skipped, monkeypatch):
    monkeypatch.chdir(skipped)
    (entry, *_) = read_quarantine("map.jsonl").values()
    with pytest.raises(ReplayError, match="takes rng"):
        replay(entry, UserFunction.of(lambda x, rng: x))
    (source, *_) = read_quarantine("jsonl.jsonl").values()
    with pytest.raises(ReplayError, match="calls no function"):
        replay(source, UserFunction.of(lambda x: x))


def test_a_pipeline_that_cannot_be_stored_is_quarantined_all_the_same(tmp_path):
    import threading

    import penstock as ps

    lock = threading.Lock()

    def fail(x):
        with lock:
            raise ValueError(x)

    file = tmp_path / "q.jsonl"
    assert list(ps.range(3).map(fail, on_error=ps.SkipErrors(budget=9, quarantine=str(file)))) == []
    entries = read_quarantine(file)
    assert [entry.message for entry in entries.values()] == ["0", "1", "2"]
    with pytest.raises(ReplayError, match="lock"):
        replay(entries[first_id(file)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "none.jsonl"], "none.jsonl cannot be read"),
        (["replay", "rng.jsonl", "nope"], "has no element nope"),
        (["replay", "rng.jsonl", ""], "say which"),
        (["replay", "rng.jsonl", "{id}", "--function", "json:nope"], "json has no 'nope'"),
        (["replay", "rng.jsonl", "{id}", "--function", "string:digits"], "not a function"),
    ],
)
def test_wrong_command_lines_are_told_apart(skipped, arguments, says):
    id_ = first_id(skipped / "rng.jsonl")
    wrong = penstock(*[argument.replace("{id}", id_) for argument in arguments], cwd=skipped)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert says in wrong.stderr


def test_a_file_that_is_no_quarantine_is_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"kind": "other"}) + "\n")
    with pytest.raises(InvalidArgumentError, match="line 1: not a quarantine file"):
        read_quarantine(tmp_path / "other.jsonl")


def test_two_skipping_operators_in_one_stage_have_a_budget_each(tmp_path):
    import penstock as ps

    def skip():
        return ps.SkipErrors(budget=10, quarantine=str(tmp_path / "q.jsonl"))

    def not_one(x):
        if x % 10 == 1:
            raise ValueError(x)
        return x

    def not_two(x):
        if x % 10 == 2:
            raise ValueError(x)
        return x

    with ps.range(100).map(not_one, on_error=skip()).map(not_two, on_error=skip()).iterator(threads=2) as iterator:
        assert len(list(iterator)) == 80
        assert iterator.state_dict()["skipped"] == 20
        assert sum(stage.skipped for stage in iterator.statistics().stages) == 20
