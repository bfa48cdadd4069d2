"""What `distribute` refuses at once, and the names it makes."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest

import penstock as ps
from penstock.client.backend import job_name
from penstock.submission.options import check_options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": ps.Ranks(4)}, "4 ranks without a rank: say which of them this process is, 0 to 3"),
        ({"ranks": ps.Ranks(coordinated=True)}, "say how many processes read in step, and which of them this is"),
        ({"ranks": 4}, "ranks=4 must be a ps.Ranks, such as ps.Ranks(8, rank)"),
        ({"sharing": "wait"}, "sharing='wait' must be a ps.Share, such as ps.Share('wait', trainer='lr-0.01')"),
        ({"placement": "local"}, "placement='local' must be a ps.Placement"),
        ({"limits": 60}, "limits=60 must be a ps.Limits"),
        ({"job": ""}, "job=''"),
        ({"job": "  "}, "job='  '"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"sharding": "files"}, "sharding='files' is not one of 'dynamic', 'off'"),
        ({"sharding": ps.Sharding("custom")}, "a function of splits and workers"),
        ({"order": "sorted"}, "order='sorted' is not one of 'relaxed', 'deterministic'"),
        ({"transport": "gzip"}, "transport='gzip' is not one of 'auto', 'sockets', 'lz4', 'zstd'"),
        ({"sharding": ps.Sharding(streams=4)}, "order='relaxed'"),
        ({"sharding": "off", "order": "deterministic"}, "use sharding='dynamic'"),
        ({"ranks": ps.Ranks(1, 0, coordinated=True), "sharding": "off"}, "use sharding='dynamic'"),
        ({"ranks": ps.Ranks(replica=1)}, "order='deterministic'"),
        ({"ranks": ps.Ranks(uneven="allow"), "order": "deterministic"}, "uneven='allow'"),
        ({"feed": [0], "ranks": ps.Ranks(uneven="pad")}, "uneven='pad' with feed=: a rank reads what its own sampler"),
        ({"to": "udp://x:1"}, "tcp://host:port"),
        ({"to": 0}, "to=0"),
        ({"to": 3.5}, "to=3.5"),
    ],
)
def test_what_cannot_work_is_refused_at_once_with_the_choices(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        ps.range(3).distribute(**arguments)  # type: ignore[arg-type]
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("record", "arguments", "words"),
    [
        (ps.Limits, {"timeout_s": 0}, "timeout_s=0"),
        (ps.Limits, {"collect_after_s": float("nan")}, "collect_after_s=nan"),
        (ps.Limits, {"memory_bytes": 1.5}, "memory_bytes=1.5"),
        (ps.Limits, {"memory_bytes": 65536}, "memory_bytes=65536 must be at least 1 MiB"),
        (ps.Feed, {"sampler": "abc"}, "must be a sampler"),
        (ps.Feed, {"sampler": iter([1])}, "only once"),
        (ps.Feed, {"sampler": [1], "ahead": 0}, "ahead=0 must be a whole number of at least 1"),
    ],
)
def test_limits_and_feeds_check_themselves(record: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InvalidArgumentError) as refused:
        record(**arguments)
    assert words in str(refused.value)


def test_a_policy_and_a_function_are_short_for_a_sharding() -> None:
    assert check_options(sharding="off").sharding == ps.Sharding("off", "zero_or_more")
    own = check_options(sharding=len)  # type: ignore[arg-type]
    assert (own.sharding, own.shard) == (ps.Sharding("custom"), len)


def test_a_deterministic_job_has_sixteen_streams_a_rank() -> None:
    assert check_options(order="deterministic", ranks=ps.Ranks(2, 0)).sharding.streams == 32
    assert check_options(sharding=ps.Sharding(streams=1)).order == "deterministic"


def test_what_is_the_processes_own_is_not_the_jobs() -> None:
    options = check_options(ranks=ps.Ranks(8, 3, "pad"), sharing=ps.Share("wait", "a", writable=True))
    assert (options.ranks, options.rank) == (ps.Ranks(8, uneven="pad"), 3)
    assert (options.sharing, options.trainer, options.writable) == (ps.Share("wait"), "a", True)


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
        job_name(check_options(ranks=ps.Ranks(2, 1)), "abc", {})


def test_what_is_documented_is_what_is_checked():
    documented = {p.name: p.default for p in list(inspect.signature(ps.Dataset.distribute).parameters.values())[2:]}
    assert documented == {p.name: p.default for p in inspect.signature(check_options).parameters.values()}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ps.Placement(requires=5), "requires=5 must be tags"),
        (lambda: ps.Placement(requires=("",)), "requires="),
        (lambda: ps.Limits(memory_bytes=300), "memory_bytes=300 must be at least 1 MiB"),
    ],
)
def test_a_record_refuses_what_cannot_be_meant(make: Any, sentence: str) -> None:
    with pytest.raises(ps.InvalidArgumentError, match=sentence):
        make()


def test_an_unknown_argument_is_answered_with_the_one_that_was_meant() -> None:
    wrong = {"rank": "ranks", "share": "sharing", "place": "placement", "limit": "limits", "num_workers": "to"}
    for given, meant in wrong.items():
        with pytest.raises(TypeError, match=rf"distribute\(\) has no argument '{given}'; did you mean {meant}=\?"):
            ps.range(3).distribute(**{given: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"has no argument 'xyzzy'\. It takes to, job, ranks"):
        ps.range(3).distribute(xyzzy=1)  # type: ignore[call-arg]
