from __future__ import annotations

import random

from penstock.wire.slabs import IDLE_S, KEPT_BYTES, FreeRanges, IdleRange, ranges_to_cool

MB = 1 << 20
PAGE = 4096


def warm_bytes(free: FreeRanges) -> int:
    return sum(one.size for one in free.idle())


def test_ranges_never_overlap_and_all_come_back() -> None:
    choose = random.Random(3)
    free = FreeRanges(1 * MB)
    taken: list[tuple[int, int]] = []
    for _ in range(3000):
        if taken and choose.random() < 0.5:
            free.give(*taken.pop(choose.randrange(len(taken))))
        else:
            asked = choose.choice([1, 64, 100, 5000, 70_000, 200_000])
            found = free.take(asked)
            if found is not None:
                assert found[1] >= asked and found[0] % 64 == 0 and sum(found) <= MB
                assert all(found[0] >= sum(other) or sum(found) <= other[0] for other in taken)
                taken.append(found)
    for one in taken:
        free.give(*one)
    assert free.free_bytes == MB and free.take(MB) == (0, MB)


def test_ranges_never_overlap_while_some_are_cooled() -> None:
    """Cooled ranges are withdrawn for a while, as they are while their pages are given back to the system."""
    choose = random.Random(5)
    free = FreeRanges(256 * MB)
    taken: list[tuple[int, int]] = []
    away: list[list[tuple[int, int]]] = []
    cooled = 0
    for now in range(6000):
        act = choose.random()
        if act < 0.45 and taken:
            free.give(*taken.pop(choose.randrange(len(taken))), now_s=now / 50)
        elif act < 0.9:
            found = free.take(choose.choice([100, 5000, 131_072, 700_000, 3_000_000]))
            if found is not None:
                others = [*taken, *(one for ranges in away for one in ranges)]
                assert all(found[0] >= sum(other) or sum(found) <= other[0] for other in others)
                taken.append(found)
        elif act < 0.95:
            away.append(ranges_to_cool(free.idle(), now / 50))
            free.withdraw(away[-1])
            cooled += sum(size for _, size in away[-1])
        elif away:
            free.give_cold(away.pop())
        used = sum(size for _, size in taken) + sum(size for ranges in away for _, size in ranges)
        assert free.free_bytes == 256 * MB - used
    assert cooled > 64 * MB
    for one in taken:
        free.give(*one)
    for ranges in away:
        free.give_cold(ranges)
    assert free.free_bytes == 256 * MB and free.take(256 * MB) == (0, 256 * MB)


def test_what_was_given_back_last_is_taken_first_whatever_its_size() -> None:
    free = FreeRanges(64 * MB)
    smaller, larger = free.take(100 * PAGE), free.take(110 * PAGE)
    assert smaller is not None and larger is not None
    free.give(*smaller, now_s=1.0)
    free.give(*larger, now_s=2.0)
    assert free.take(100 * PAGE) == larger


def test_untouched_memory_is_taken_only_when_nothing_given_back_fits() -> None:
    free = FreeRanges(64 * MB)
    small = [free.take(MB // 8) for _ in range(16)]
    for one in small:
        assert one is not None
        free.give(*one)
    assert free.take(2 * MB) == (0, 2 * MB), "sixteen neighbours are as good as one"
    fresh = free.take(MB)
    assert fresh == (2 * MB, MB)


def test_requests_of_all_sizes_take_hardly_more_memory_than_is_needed() -> None:
    choose = random.Random(11)
    free = FreeRanges(1024 * MB)
    taken: list[tuple[int, int]] = []
    highest = 0
    for _ in range(20_000):
        if len(taken) == 32:
            free.give(*taken.pop(choose.randrange(32)))
        found = free.take(choose.randrange(64_000, MB))
        assert found is not None
        highest = max(highest, sum(found))
        taken.append(found)
    assert highest < 2 * 32 * MB


def test_what_is_needed_stays_and_what_has_been_idle_goes() -> None:
    young = IdleRange(0, 32 * MB, 100.0)
    old = IdleRange(64 * MB, 8 * MB, 100.0 - IDLE_S)
    assert ranges_to_cool([young, old], 100.0) == [(64 * MB, 8 * MB)]
    assert ranges_to_cool([young], 100.0) == []


def test_some_idle_memory_is_always_kept() -> None:
    free = FreeRanges(128 * MB)
    for one in [free.take(MB) for _ in range(100)]:
        assert one is not None
        free.give(*one)
    for now in range(100, 200):
        before = warm_bytes(free)
        chosen = ranges_to_cool(free.idle(), float(now))
        free.withdraw(chosen)
        free.give_cold(chosen)
        assert before - warm_bytes(free) <= max(KEPT_BYTES, before // 4)
    assert warm_bytes(free) == KEPT_BYTES


def test_the_longest_idle_goes_first() -> None:
    idle = [IdleRange(at * 16 * MB, 16 * MB, float(at)) for at in range(3)]
    assert ranges_to_cool(idle, 100.0) == [(0, 16 * MB)]


def test_one_large_idle_range_goes_in_part() -> None:
    ((offset, size),) = ranges_to_cool([IdleRange(64, 400 * MB, 0.0)], 100.0)
    assert 100 * MB - 2 * PAGE <= size <= 100 * MB
    assert offset % PAGE == 0 and offset + size <= 64 + 400 * MB


def test_only_whole_pages_are_cooled() -> None:
    idle = [IdleRange(64, PAGE, 0.0), IdleRange(10 * PAGE - 64, 32 * MB, 1.0)]
    ((offset, size),) = ranges_to_cool(idle, 100.0)
    assert offset % PAGE == 0 and size % PAGE == 0
    assert offset >= 10 * PAGE and offset + size <= 10 * PAGE - 64 + 32 * MB


def test_cooled_memory_is_the_last_to_be_taken() -> None:
    free = FreeRanges(128 * MB)
    ranges = [free.take(MB) for _ in range(64)]
    for at, one in enumerate(ranges):
        assert one is not None
        free.give(*one, now_s=float(at))
    cooled = ranges_to_cool(free.idle(), 1000.0)
    free.withdraw(cooled)
    assert cooled and warm_bytes(free) == 64 * MB - sum(size for _, size in cooled)
    free.give_cold(cooled)
    again = [free.take(MB) for _ in range(warm_bytes(free) // MB)]
    assert not set(again) & set(cooled)
    assert free.take(MB) == min(cooled)
