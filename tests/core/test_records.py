"""Records that users make answer a wrong call with the right one."""

from __future__ import annotations

import inspect
import pickle

import msgspec
import pytest

import penstock as ps
from penstock.core.records import UserRecord


@pytest.mark.parametrize(
    ("record", "given", "said"),
    [
        (
            ps.Limits,
            {"timeout": 5},
            r"^Limits\(\) has no argument 'timeout'; did you mean timeout_s=\? It takes timeout_s",
        ),
        (ps.Limits, {"memory": 1 << 20}, r"did you mean memory_bytes=\?"),
        (ps.Ranks, {"world_size": 2}, r"did you mean count=\?"),
        (ps.Ranks, {"rnak": 1}, r"did you mean rank=\?"),
        (ps.Sharding, {"polcy": "file"}, r"did you mean policy=\?"),
        (ps.Share, {"kind": "wait", "trainer_id": "x"}, r"did you mean trainer=\?"),
        (ps.Share, {"trainer": "x"}, r"^Share\(\) needs kind=\. It takes kind, trainer"),
        (ps.Feed, {"samples": [1]}, r"did you mean sampler=\?"),
        (ps.Placement, {"num_workers": 2}, r"did you mean workers=\?"),
        (ps.Access, {"shared_with": "b"}, r"did you mean share_with=\?"),
        (ps.SkipErrors, {"max_errors": 5}, r"has no argument 'max_errors'\. It takes budget, quarantine"),
        (ps.Offloading, {"windows": 1}, r"did you mean window_s=\?"),
        (ps.Feature, {"id": 1, "nam": "x"}, r"did you mean name=\?"),
        (ps.transforms.Clamp, {"inputs": "a"}, r"^Clamp\(\) has no argument 'inputs'; did you mean input=\?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(record: type, given: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        record(**given)


def test_places_that_do_not_fit_are_answered_with_names() -> None:
    with pytest.raises(
        TypeError, match=r"Limits\(\) was given 1 arguments without a name, and takes 0 so; give them by"
    ):
        ps.Limits(60)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Ranks\(\) was given count twice"):
        ps.Ranks(2, count=3)  # type: ignore[misc]


def test_an_error_of_another_kind_is_left_alone() -> None:
    class Raising(UserRecord, frozen=True):
        value: int

        def __post_init__(self) -> None:
            raise TypeError("this value will not do")

    with pytest.raises(TypeError, match=r"^this value will not do$"):
        Raising(1)


def test_records_travel_as_before() -> None:
    ranks = ps.Ranks(2, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ranks), type=ps.Ranks) == ranks
    assert pickle.loads(pickle.dumps(ranks)) == ranks


def test_every_public_record_that_is_made_by_users_answers() -> None:
    given_back = {  # results, which users read and do not make
        name
        for name in ps.__all__
        if name.endswith(("Figures", "Line", "Statistics", "Snapshot")) or name in ("Offload", "OffloadProfile")
    }
    made = {
        name
        for name in ps.__all__
        if inspect.isclass(kind := getattr(ps, name)) and issubclass(kind, msgspec.Struct) and name not in given_back
    }
    assert {name for name in made if not issubclass(getattr(ps, name), UserRecord)} <= {"SavedDataset"}
