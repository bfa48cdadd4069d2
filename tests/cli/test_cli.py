"""The command line: what each command prints, and with which code it exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import demo, demo_data, demo_service, doctor, main
from penstock.cli.outline import outline
from penstock.runtime.quarantine import read_quarantine

MODULE = """
import penstock as ps


def double(x):
    return 2 * x


numbers = ps.range(1000).map(double).batch(10)


def make():
    return numbers


class Namespace:
    inner = numbers


def fail():
    raise RuntimeError("no data today")


three = 3
"""


def penstock(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "penstock"
    return subprocess.run(
        [str(command), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a module of the user's; what it puts into sys.path and sys.modules is taken back."""
    (tmp_path / "training.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "training", raising=False)
    yield tmp_path
    sys.modules.pop("training", None)


def test_the_command_is_installed(tmp_path):
    ran = penstock("--version", cwd=tmp_path)
    assert ran.returncode == 0
    assert ran.stdout.startswith("penstock 0.")


def test_help_imports_nothing_heavy(tmp_path):
    code = """
import sys
from penstock.cli.main import main
try:
    main(["--help"])
except SystemExit as stop:
    assert stop.code == 0
heavy = {"rich", "cv2", "torch", "datasets", "fsspec", "pyarrow.parquet", "pyarrow.dataset", "asyncio"}
print("heavy:", sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "replay" in ran.stdout and "heavy: []" in ran.stdout


@pytest.mark.parametrize("command", sorted(main._COMMANDS))
def test_every_command_says_in_its_help_what_it_does(command, capsys):
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    _, sentence, *_ = capsys.readouterr().out.split("\n\n")
    assert sentence[0].isupper() and sentence.rstrip().endswith("."), sentence


def test_a_quarantine_file_without_elements_is_said_to_be_empty(tmp_path, capsys):
    (tmp_path / "none.jsonl").touch()
    assert main.main(["replay", str(tmp_path / "none.jsonl")]) == 0
    assert "no element was skipped" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"], ["explain"], ["explain", "a:b", "--seconds", "-1"]])
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    assert "usage: penstock" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["training:numbers", "training:make", "training.py:make", "training:Namespace.inner"])
def test_explain_finds_a_dataset_by_module_or_file(folder, named, capsys):
    assert main.main(["explain", named]) == 0
    written, _, run = capsys.readouterr().out.partition("\n\n")
    assert written.splitlines() == ["as written", "  range(0, 1000)", "  map(double)", "  batch(10)"]
    assert run.startswith("as run\n  range(0, 1000)\n  fused: map(double) + batch(10)")


def test_explain_draws_and_measures(folder, capsys):
    assert main.main(["explain", "training:numbers", "--mermaid"]) == 0
    assert capsys.readouterr().out.startswith("flowchart TD")
    assert main.main(["explain", "training:numbers", "--analyze", "--seconds", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "µs each" in shown and "reader waits" in shown


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("training", "not of the form module:name"),
        ("nowhere:numbers", "no module 'nowhere'"),
        ("nowhere.py:numbers", "no file nowhere.py"),
        ("training:missing", "training has no 'missing'; it has Namespace, double, fail, make, numbers, ps, three"),
        ("training:three", "of type int, not a Dataset"),
    ],
)
def test_explain_says_what_it_did_not_find(folder, named, says, capsys):
    assert main.main(["explain", named]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and says in shown.err


def test_an_error_of_the_users_code_is_shown_as_it_is(folder):
    ran = penstock("explain", "training.py:fail", cwd=folder)
    assert ran.returncode == 1
    assert 'training.py", line' in ran.stderr and "RuntimeError: no data today" in ran.stderr
    (folder / "broken.py").write_text("import missing_package\n")
    ran = penstock("explain", "broken:numbers", cwd=folder)
    assert ran.returncode == 1
    assert "No module named 'missing_package'" in ran.stderr


def test_an_error_of_the_pipeline_is_one_line(folder):
    (folder / "empty.py").write_text("import penstock as ps\nds = ps.read_text('nothing-*.txt')\n")
    ran = penstock("explain", "empty:ds", "--analyze", cwd=folder)
    assert ran.returncode == 1
    assert ran.stderr.startswith("penstock explain: ") and "nothing-*.txt" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_doctor_reports_limits_and_extras(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("PENSTOCK_MEMORY_BYTES", str(512 << 20))
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "obstore" else "1.0")
    assert main.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "SLURM_CPUS_PER_TASK     1" in shown and "threads used            1" in shown
    assert "512 MiB" in shown
    assert "obstore not installed; run: pip install 'penstock[s3]'" in shown
    assert "simplejpeg 1.0, opencv-python-headless 1.0" in shown


def test_doctor_fails_where_something_needed_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "pyarrow" else "1.0")
    assert main.main(["doctor"]) == 1
    assert "missing: pyarrow" in capsys.readouterr().out


def test_doctor_sees_the_byte_code_setting(tmp_path):
    assert "unset it" in penstock("doctor", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1").stdout
    assert "unset it" not in penstock("doctor", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="").stdout


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    """Make the demo's data small, and have it made below a folder of the test's."""
    for name, value in {"IMAGES": 64, "DAMAGED": 12, "DOCUMENTS": 200, "ROWS": 8000}.items():
        monkeypatch.setattr(demo_data, name, value)
    monkeypatch.setattr(demo_service, "CALLS", 100)
    for module in (demo, demo_service):
        monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(demo, "ANALYZE_S", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", ["JPEG", "PPM"])
def test_the_demo_passes_its_checks(small_demo, kind, monkeypatch, capsys):
    for module in (demo, demo_data):
        monkeypatch.setattr(module, "has_images_extra", lambda: kind == "JPEG")
    assert main.main(["demo", "--keep"]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("all checks passed")
    assert shown.count("passed") == 10 + 1 and "FAILED" not in shown
    assert f"({kind})" in shown.replace("\n", " ") and "64 of 64" in shown and "reader waits" in shown
    assert "making data" not in shown, "there is no progress line where there is no terminal"
    (folder,) = small_demo.glob("penstock-demo-*")
    (id_,) = read_quarantine(folder / "skipped.jsonl")
    assert f"penstock replay {folder}/skipped.jsonl {id_}" in shown


def test_the_demo_command_runs_through(tmp_path):
    ran = penstock("demo", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("all checks passed") and ran.stderr == ""


def test_the_replay_command_that_the_demo_shows_works(small_demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SECTIONS", {"errors": demo.skipping})
    assert main.main(["demo", "--keep"]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if "penstock replay" in line)
    ran = penstock(*command.partition("penstock ")[2].split(), cwd=small_demo)
    assert ran.returncode == 1
    assert "demo_data.py" in ran.stderr and "penstock: in map(augment)" in ran.stderr


def test_the_demo_cleans_up_and_fails_when_a_check_fails(small_demo, monkeypatch, capsys):
    def broken(data):
        yield demo.Finding("two and two", "five", False)

    monkeypatch.setattr(demo, "SECTIONS", {"errors": demo.skipping, "sums": broken})
    assert main.main(["demo"]) == 1
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("failed: two and two") and "FAILED" in shown
    assert list(small_demo.glob("penstock-demo-*")) == []


def test_an_outline_is_one_short_line():
    element = {"tokens": list(range(1000)), "text": "x" * 1000, "inner": ({"a": None}, 2.5)}
    shown = outline(element)
    assert len(shown) < 160 and "\n" not in shown
    assert "(1000 characters)" in shown and "({'a': None}, 2.5)" in shown
