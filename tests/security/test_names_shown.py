"""Names of jobs are their makers': an operator that lists them is shown text, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.jobs import print_table, run_jobs
from penstock.core.ids import ClientId, JobName
from penstock.wire.control import ControlClient
from penstock.wire.credentials import ServiceFile
from tests.dispatcher.serving import KEY, open_job, opening, put_blobs, served

HOSTILE = "\x1b[2J\x1b]0;owned\x07job\nworkers: 0 \x9b31m"


def test_a_jobs_name_does_nothing_to_the_terminal_of_who_lists_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as running, ControlClient(running.address, KEY, name="hostile") as control:
        put_blobs(control)
        open_job(control, opening(job=JobName(HOSTILE), client=ClientId("c")))
        file = tmp_path / "service.json"
        ServiceFile(address=running.address, credentials=KEY).write(file)
        assert run_jobs(str(file), None, None) == 0
    said = capsys.readouterr().out
    assert "job workers: 0" in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said), said


def test_what_looks_like_markup_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table("jobs", ("job",), [("[link=file:///etc]here[/link]",)])
    assert "[link=file:///etc]" in capsys.readouterr().out.replace("\n", "")
