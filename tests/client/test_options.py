"""What `distribute` refuses at once, and the names it makes."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest

import penstock as ps
from penstock.client.options import check_options, job_name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"consumers": 4}, "4 ranks without a rank: say which of them this process is, 0 to 3"),
        ({"consumers": 2, "consumer": 2}, "rank=2 is not one of 2 ranks: they are 0 to 1"),
        ({"consumers": 2, "consumer": -1}, "rank=-1"),
        ({"consumers": 0}, "count=0"),
        ({"job": ""}, "job=''"),
        ({"job": "  "}, "job='  '"),
        ({"sharding": "files"}, "sharding='files' is not one of 'dynamic', 'off'"),
        ({"guarantee": "once"}, "guarantee='once' is not one of 'exactly_once'"),
        ({"sharding": "off", "guarantee": "exactly_once"}, "zero_or_more"),
        ({"guarantee": "zero_or_more"}, "sharding='off'"),
        ({"order": "sorted"}, "order='sorted' is not one of 'relaxed', 'deterministic'"),
        ({"uneven": "x"}, "uneven='x' is not one of 'drop', 'pad', 'allow'"),
        ({"compression": "gzip"}, "compression='gzip' is not one of 'none', 'lz4', 'zstd'"),
        ({"target": "here"}, "target='here' is not one of 'local', 'remote', 'any'"),
        ({"streams": 4}, "order='relaxed'"),
        ({"streams": 4, "sharding": "file"}, "streams=4"),
        ({"replica": 1}, "order='deterministic'"),
        ({"uneven": "allow", "order": "deterministic"}, "uneven='allow'"),
        ({"timeout": 0}, "timeout_s=0"),
        ({"max_workers": 0}, "max_workers=0"),
        ({"memory_bytes": 1.5}, "memory_bytes=1.5"),
        ({"memory_bytes": 65536}, "memory_bytes=65536 must be at least 1 MiB"),
        ({"to": 1, "memory_bytes": 65536}, "memory_bytes=65536 must be at least 1 MiB"),
        ({"to": "udp://x:1"}, "tcp://host:port"),
        ({"to": 0}, "to=0"),
        ({"to": 3.5}, "to=3.5"),
    ],
)
def test_what_cannot_work_is_refused_at_once_with_the_choices(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        ps.range(3).distribute(**arguments)  # type: ignore[arg-type]
    assert words in str(refused.value)


def test_the_guarantee_follows_from_the_sharding() -> None:
    assert check_options().sharding.guarantee == "exactly_once"
    assert check_options(sharding="off").sharding.guarantee == "zero_or_more"
    assert check_options(sharding="file", guarantee="at_most_once").sharding.guarantee == "at_most_once"
    assert check_options(sharding=lambda splits, workers: [[]]).sharding.policy == "custom"


def test_a_deterministic_job_has_sixteen_streams_a_consumer() -> None:
    assert check_options(order="deterministic", consumers=2, consumer=0).sharding.streams == 32
    assert check_options(streams=1).order == "deterministic"


def test_a_job_is_named_after_the_launchers_run() -> None:
    options = check_options()
    counts: Counter[str] = Counter()
    assert job_name(options, "abcdef0123", {"SLURM_JOB_ID": "77"}, counts) == "77-abcdef01"
    assert job_name(options, "abcdef0123", {"SLURM_JOB_ID": "77"}, counts) == "77-abcdef01-2"
    assert job_name(options, "abcdef0123", {"TORCHELASTIC_RUN_ID": "none"}, counts).endswith("-abcdef01")
    assert job_name(options, "abcdef0123", {}, counts) != job_name(options, "abcdef0123", {}, counts)
    assert job_name(check_options(job="mine"), "abcdef0123", {"SLURM_JOB_ID": "77"}, counts) == "mine"


def test_several_consumers_without_a_launcher_need_a_name() -> None:
    with pytest.raises(ValueError, match="give job="):
        job_name(check_options(consumers=2, consumer=1), "abc", {})


def test_what_is_documented_is_what_is_checked():
    documented = {p.name: p.default for p in list(inspect.signature(ps.Dataset.distribute).parameters.values())[2:]}
    assert documented == {p.name: p.default for p in inspect.signature(check_options).parameters.values()}
