"""The records of a job's modes: what each refuses by itself, and what of it all processes agree on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.wire.jobs import JobSpec
from penstock.wire.modes import Placement, Ranks, Sharding, Share
from tests.job_specs import job_spec


@pytest.mark.parametrize(
    ("record", "fields", "words"),
    [
        (Ranks, {"count": 0}, "count=0 must be a whole number of at least 1"),
        (Ranks, {"count": 2, "rank": 2}, "rank=2 is not one of 2 ranks: they are 0 to 1"),
        (Ranks, {"count": 2, "rank": -1}, "rank=-1 must be a whole number"),
        (Ranks, {"uneven": "x"}, "uneven='x' is not one of 'drop', 'pad', 'allow'"),
        (Ranks, {"coordinated": 1}, "coordinated=1 must be True or False"),
        (Ranks, {"coordinated": True, "uneven": "allow"}, "use uneven='drop' or 'pad'"),
        (Sharding, {"policy": "files"}, "sharding='files' is not one of 'dynamic', 'off'"),
        (Sharding, {"guarantee": "once"}, "guarantee='once' is not one of"),
        (Sharding, {"guarantee": "zero_or_more"}, "is what sharding='off' gives"),
        (Sharding, {"policy": "off", "guarantee": "at_most_once"}, "only guarantee='zero_or_more' can be promised"),
        (Sharding, {"policy": "off", "streams": 2}, "leave streams= out"),
        (Sharding, {"policy": "file", "streams": 2}, "leave streams= out"),
        (Sharding, {"streams": 0}, "streams=0 must be a whole number of at least 1"),
        (Sharding, {"function": print}, "goes with sharding='custom'"),
        (Share, {"kind": "hurry"}, "sharing='hurry' is not one of 'skip', 'wait'"),
        (Share, {"kind": "wait", "trainer": " "}, "trainer=' ' must be a name"),
        (Share, {"kind": "wait", "window_bytes": 100}, "window_bytes=100 must be a whole number of at least 4096"),
        (Share, {"kind": "wait", "trainer_timeout_s": float("nan")}, "trainer_timeout_s=nan must be a number above 0"),
        (Share, {"kind": "skip", "trainers": 2}, "says who is waited for"),
        (Placement, {"target": "here"}, "target='here' is not one of 'local', 'remote', 'any'"),
        (Placement, {"requires": ["gpu", ""]}, "requires=['gpu', ''] must be tags of workers"),
        (Placement, {"max_workers": 0}, "max_workers=0 must be a whole number of at least 1"),
    ],
)
def test_a_record_refuses_what_cannot_work_and_says_what_can(record: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        record(**fields)
    assert words in str(refused.value)


def test_the_guarantee_becomes_the_most_that_the_policy_can_promise() -> None:
    assert Sharding() == Sharding(guarantee="exactly_once")
    assert Sharding("off") == Sharding("off", "zero_or_more")
    assert Sharding("file", "at_most_once").guarantee == "at_most_once"


def test_processes_of_one_job_agree_on_all_but_what_is_their_own() -> None:
    assert Ranks(8, 3, "pad", replica=1).agreed() == Ranks(8, uneven="pad") == Ranks(8, 4, "pad").agreed()
    assert Share("wait", "a", trainers=2, writable=True).agreed() == Share("wait", "b", trainers=2).agreed()
    assert Sharding("custom", function=print).agreed() == Sharding("custom")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, (8, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (2, 0)),
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (4, 1)),  # torchrun under srun
    ],
)
def test_a_launcher_says_which_rank_this_is(environment: dict[str, str], found: tuple[int, int]) -> None:
    ranks = Ranks.from_environment(uneven="pad", environment=environment)
    assert ranks == Ranks(*found, uneven="pad")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no launcher says which rank this is"),
        ({"RANK": "3"}, "torchrun sets $RANK and $WORLD_SIZE to whole numbers, and here they are '3' and None"),
        ({"RANK": "a", "WORLD_SIZE": "8"}, "here they are 'a' and '8'"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "rank=8 is not one of 8 ranks"),
    ],
)
def test_a_rank_is_never_guessed(environment: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Ranks.from_environment(environment=environment)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("target", "there"), [("any", {"here", "elsewhere"}), ("local", {"here"}), ("remote", {"elsewhere"})]
)
def test_a_target_says_which_hosts_serve(target: Any, there: set[str]) -> None:
    assert {host for host in ("here", "elsewhere") if Placement(target).takes(host, creator="here")} == there


def test_records_travel_with_the_spec_and_are_checked_on_arrival() -> None:
    sent = job_spec(
        consumers=3, coordinated=True, streams=4, sharing="wait", trainers=2, requires=("gpu",), transport="lz4"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=JobSpec) == sent
    broken: dict[str, Any] = msgspec.to_builtins(sent)
    broken["ranks"]["count"] = 0
    with pytest.raises(msgspec.ValidationError, match="count=0"):
        msgspec.convert(broken, JobSpec)


def test_a_spec_of_an_earlier_release_is_refused_and_not_read_as_one_with_defaults() -> None:
    """Its fields had no records: read as they are now, all of them would be left out."""
    flat = {"fingerprint": "f", "graph": "g", "splits": "s", "split_counts": [1], "seed": 7, "consumers": 2}
    with pytest.raises(msgspec.ValidationError, match="ranks"):
        msgspec.convert(flat, JobSpec)
