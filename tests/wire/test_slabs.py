from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.core.errors import CodecError
from penstock.wire.frames import SlabPlaces
from penstock.wire.leases import COPY_BELOW_BYTES, RETURN_BYTES, SlabReader
from penstock.wire.neighbours import receive_descriptor
from penstock.wire.runs import decode_run, encode_run
from penstock.wire.slabs import KEPT_BYTES, Arena, Holder
from tests.waiting import wait_until

MB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * MB)
    made.allow_writers()
    yield made
    made.close()


@pytest.fixture
def reader(arena: Arena) -> SlabReader:
    made = SlabReader.connect(arena.name)
    assert made is not None
    return made


def batch(value: int, size: int = 2 * MB) -> np.ndarray:  # type: ignore[type-arg]
    return np.full(size // 4, value, np.float32)


def test_a_batch_is_read_where_it_was_written_and_can_be_written_to(arena: Arena, reader: SlabReader) -> None:
    layout, buffers = encode_run([{"x": batch(1), "y": np.arange(100)}])
    places = arena.place(buffers)
    assert places is not None
    (got,) = decode_run(layout, reader.claim(places).arrays())
    assert (got["x"] == 1).all() and (got["y"] == np.arange(100)).all()
    assert got["x"].flags.writeable and got["x"].flags.aligned and got["x"].ctypes.data % 64 == 0
    got["x"][:] = 5


def test_an_array_made_in_the_arena_is_not_copied(arena: Arena, reader: SlabReader) -> None:
    rows = arena.array((64, 8192), np.float32)
    assert rows is not None
    rows[...] = 3
    free = arena.free_bytes
    layout, buffers = encode_run([rows])
    places = arena.place(buffers)
    assert places is not None and arena.free_bytes == free
    del buffers
    rows[0, 0] = 77  # the same memory: the reader sees it
    (got,) = decode_run(layout, reader.claim(places).arrays())
    assert got[0, 0] == 77 and got.shape == (64, 8192)


def test_a_run_encoded_into_the_arena_is_not_copied_again(arena: Arena) -> None:
    rows = [np.full(10_000, i, np.float64) for i in range(4)]
    _, buffers = encode_run(rows, arena.array)
    free_bytes = arena.free_bytes
    places = arena.place(buffers)
    assert places is not None and arena.free_bytes == free_bytes
    assert arena.views(places)[0].tobytes() == np.concatenate(rows).tobytes()


def test_what_is_sent_twice_is_copied_so_that_readers_do_not_share_it(arena: Arena) -> None:
    rows = arena.array((MB,), np.float32)
    assert rows is not None
    places = [arena.place([rows], exclusive=exclusive) for exclusive in (False, True, True, False)]
    starts = [place.places[0][0] for place in places if place is not None]
    assert len(set(starts)) == 4


def test_the_lease_ends_with_the_last_array_over_it_and_not_before(arena: Arena, reader: SlabReader) -> None:
    layout, buffers = encode_run([{"x": batch(1), "y": batch(2)}])
    places = arena.place(buffers)
    assert places is not None
    (got,) = decode_run(layout, reader.claim(places).arrays())
    row = got["x"][10:20].reshape(2, 5).view(np.int32)
    del got
    gc.collect()
    assert reader.returned() == ()
    assert (row.view(np.float32) == 1).all()
    del row
    assert reader.returned() == (places.lease,)
    assert reader.returned() == ()


def test_rows_of_a_run_each_keep_the_lease(arena: Arena, reader: SlabReader) -> None:
    elements = [{"x": np.full(256, i, np.float32), "y": i} for i in range(4000)]
    layout, buffers = encode_run(elements)
    places = arena.place(buffers)
    assert places is not None
    kept = decode_run(layout, reader.claim(places).arrays())[1234]
    gc.collect()
    assert reader.returned() == ()
    assert (kept["x"] == 1234).all() and kept["y"] == 1234
    del kept
    assert reader.returned() == (places.lease,)


def test_what_is_small_is_copied_by_the_reader_and_given_back_at_once(arena: Arena, reader: SlabReader) -> None:
    places = arena.place([batch(1, COPY_BELOW_BYTES // 2)])
    assert places is not None
    (kept,) = reader.claim(places).arrays()
    assert reader.returned() == (places.lease,)
    arena.leases.remove([places.lease])
    again = arena.place([batch(2, COPY_BELOW_BYTES // 2)])
    assert again is not None and again.places == places.places
    assert (kept.view(np.float32) == 1).all() and kept.flags.writeable


def test_memory_is_not_written_to_while_anybody_has_it(arena: Arena, reader: SlabReader) -> None:
    """Random placing, keeping and dropping: whatever is kept never changes."""
    choose = random.Random(7)
    kept: list[tuple[int, object, object]] = []
    for number in range(400):
        if choose.random() < 0.2:
            made = arena.array((choose.randrange(MB // 2, MB),), np.float32)
            source = batch(number) if made is None else made
            source[...] = number
        else:
            source = batch(number, choose.randrange(COPY_BELOW_BYTES, 4 * MB) // 4 * 4)
        places = arena.place([source])
        source = made = None
        if places is not None:
            kept.append((number, places, reader.claim(places).arrays()[0].view(np.float32)))
        while kept and (places is None or choose.random() < 0.45):
            expected, _, array = kept.pop(choose.randrange(len(kept)))
            assert (array == expected).all()  # type: ignore[attr-defined]
            del array
            arena.leases.remove(reader.returned())
            places = ()  # type: ignore[assignment]
    for expected, _, array in kept:
        assert (array == expected).all()  # type: ignore[attr-defined]
    del array
    kept.clear()
    gc.collect()
    arena.leases.remove(reader.returned())
    assert arena.free_bytes == arena.max_bytes and len(arena.leases) == 0


def test_a_reader_that_keeps_everything_is_sent_by_socket_and_later_by_slab_again(
    arena: Arena, reader: SlabReader
) -> None:
    kept = []
    while (places := arena.place([batch(len(kept), 8 * MB)])) is not None:
        kept.append(reader.claim(places).arrays()[0].view(np.float32))
    assert 6 <= len(kept) <= 8
    assert arena.array((4 * MB,), np.float32) is None
    assert all((array == i).all() for i, array in enumerate(kept))
    kept.clear()
    arena.leases.remove(reader.returned())
    assert arena.place([batch(0, 8 * MB)]) is not None


def test_a_lost_readers_leases_are_taken_back_and_no_others(arena: Arena) -> None:
    mine, other = arena.place([batch(1)], Holder("a", 1)), arena.place([batch(2)], Holder("b", 1))
    assert mine is not None and other is not None
    arena.leases.give_back([other.lease, 999], "a")
    assert len(arena.leases) == 2
    arena.leases.remove_reader("a")
    assert len(arena.leases) == 1
    own = arena.place([batch(3)])
    assert own is not None
    for name in ("", "None", "a"):
        arena.leases.give_back([own.lease], name)
    assert len(arena.leases) == 2
    arena.leases.remove([own.lease])
    arena.leases.give_back([other.lease], "b")
    assert arena.free_bytes == arena.max_bytes


def test_freed_memory_is_reused_last_in_first_out(arena: Arena) -> None:
    places = [arena.place([batch(i)]) for i in range(3)]
    for place in places:
        assert place is not None
        arena.leases.remove([place.lease])
    last = places[-1]
    again = arena.place([batch(9)])
    assert again is not None and last is not None and again.places == last.places


def test_buffers_of_no_bytes_and_of_any_kind_are_placed(arena: Arena, reader: SlabReader) -> None:
    places = arena.place([b"", b"abc", bytearray(b"de"), memoryview(b"f"), np.empty(0)])
    assert places is not None
    assert [bytes(part) for part in reader.claim(places).arrays()] == [b"", b"abc", b"de", b"f", b""]
    empty = arena.place([b""])
    assert empty is not None and bytes(reader.claim(empty).arrays()[0]) == b""
    assert arena.array((3,), object) is None


def test_places_outside_of_the_arena_are_refused(arena: Arena, reader: SlabReader) -> None:
    for place in ((-1, 5), (0, arena.max_bytes + 1), (arena.max_bytes, 1)):
        with pytest.raises(CodecError, match="outside"):
            reader.claim(SlabPlaces(1, (place,))).arrays()
    assert reader.returned() == ()


def test_only_who_knows_the_secret_gets_the_memory(arena: Arena) -> None:
    address, _, secret = arena.name.partition(".")
    assert SlabReader.connect(f"{address}.{'0' * len(secret)}") is None
    assert SlabReader.connect(f"{address}.", 0.1) is None
    assert SlabReader.connect(f"{address}.{secret}x") is None
    assert SlabReader.connect("penstock-nobody.secret") is None
    assert SlabReader.connect("") is None
    silent = sockets.socket(sockets.AF_UNIX)
    silent.connect(f"\0{address}")
    assert SlabReader.connect(arena.name) is not None  # nobody waits for the silent one
    silent.settimeout(30)
    assert silent.recv(1) == b""
    silent.close()
    wait_until(lambda: arena._server.refused >= 3, "the refusals to be counted")


def test_arrays_outlive_reader_and_arena() -> None:
    arena = Arena(16 * MB)
    reader = SlabReader.connect(arena.name)
    assert reader is not None
    own = arena.array((MB,), np.float32)
    assert own is not None
    own[...] = 4
    places = arena.place([batch(3)])
    assert places is not None
    (kept,) = reader.claim(places).arrays()
    reader.close()
    arena.close()
    arena.close()
    del reader, arena
    gc.collect()
    assert (kept.view(np.float32) == 3).all() and (own == 4).all()


def test_after_a_fork_the_child_gives_nothing_back_and_takes_nothing(arena: Arena, reader: SlabReader) -> None:
    places = arena.place([batch(1)])
    assert places is not None
    kept = reader.claim(places).arrays()
    free = arena.free_bytes
    child = os.fork()
    if child == 0:
        del kept
        fine = reader.returned() == () and arena.array((10,), np.int8) is None and arena.place([b"x"]) is None
        arena.close()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (kept[0].view(np.float32) == 1).all() and arena.free_bytes == free
    again = SlabReader.connect(arena.name)
    assert again is not None


_RUNNER = """
import sys, numpy as np
from penstock.wire.slabs import Arena
arena = Arena(64 << 20)
places = arena.place([np.full(1 << 20, 7, np.float32)])
print(arena.name, places.lease, *places.places[0], flush=True)
sys.stdin.read()
"""


def test_a_killed_runner_leaves_its_readers_their_arrays_and_nothing_else() -> None:
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", _RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        name, lease, offset, size = process.stdout.readline().split()
        reader = SlabReader.connect(name, 30)
        assert reader is not None
        (array,) = reader.claim(SlabPlaces(int(lease), ((int(offset), int(size)),))).arrays()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdin.close()
        process.stdout.close()
    assert (array.view(np.float32) == 7).all()
    assert SlabReader.connect(name) is None
    assert set(os.listdir("/dev/shm")) <= before
    del array
    reader.close()


def test_no_descriptor_is_left_behind() -> None:
    def once() -> None:
        arena = Arena(4 * MB)
        readers = [SlabReader.connect(arena.name) for _ in range(2)]
        places = arena.place([batch(1)])
        assert places is not None and readers[0] is not None
        kept = readers[0].claim(places).arrays()
        arena.close()
        del readers, kept

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_several_threads_place_and_release(arena: Arena, reader: SlabReader) -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(30):
            places = arena.place([batch(value, MB)], Holder(str(value), 1))
            if places is None:
                continue
            offset, size = places.places[0]
            seen = np.asarray(arena._mapping.bytes[offset : offset + size]).view(np.float32)
            if not (seen == value).all():
                wrong.append(value)
            arena.leases.give_back([places.lease], str(value))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and arena.free_bytes == arena.max_bytes


def test_readers_share_all_that_is_kept_and_little_of_what_is_not(arena: Arena) -> None:
    kept = [arena.place([np.zeros(4096, np.uint8)]) for _ in range(4)]
    assert all(kept)
    first, second, third, fourth = (places for places in kept if places is not None)
    shares = [arena.leases.share(places, Holder("reader", 1), most_bytes=4096) for places in (first, second, third)]
    assert all(shares), "what is kept anyway costs nothing"
    arena.leases.remove((first.lease,))
    assert arena.leases.share(fourth, Holder("reader", 1), most_bytes=4096) is None, "one is the reader's alone by now"
    assert arena.leases.share(second, Holder("other", 1), most_bytes=4096) is not None, "shared already"
    assert shares[0] is not None
    arena.leases.give_back((shares[0].lease,), "reader")
    assert arena.leases.share(fourth, Holder("reader", 1), most_bytes=4096) is not None


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena._descriptor).st_blocks * 512


def test_memory_that_has_been_free_for_a_while_goes_back_to_the_system(arena: Arena, reader: SlabReader) -> None:
    placed = [arena.place([batch(value)]) for value in range(24)]
    kept = placed.pop()
    assert kept is not None
    (array,) = reader.claim(kept).arrays()
    assert resident_bytes(arena) >= 48 * MB
    arena.leases.remove([places.lease for places in placed if places is not None])
    now = time.monotonic()
    assert arena.cool(now) == 0, "it was needed just now"
    while arena.cool(now + 60):
        pass
    assert resident_bytes(arena) <= KEPT_BYTES + 2 * MB + 65536
    assert (array.view(np.float32) == 23).all(), "what is held is left alone"
    assert arena.free_bytes == arena.max_bytes - 2 * MB
    for value in range(24):
        again = arena.place([batch(value)])
        assert again is not None
        assert (reader.claim(again).arrays()[0].view(np.float32) == value).all()


def test_memory_is_cooled_while_others_place_and_release(arena: Arena) -> None:
    wrong: list[int] = []
    stop = threading.Event()

    def work(value: int) -> None:
        for number in range(200):
            places = arena.place([batch(value, (1 + number % 5) * MB)], Holder(str(value), 1))
            if places is not None:
                offset, size = places.places[0]
                if not (arena._mapping.bytes[offset : offset + size].view(np.float32) == value).all():
                    wrong.append(value)
                arena.leases.give_back([places.lease], str(value))

    def cool() -> None:
        while not stop.is_set():
            arena.cool(time.monotonic() + 60)

    cooler = threading.Thread(target=cool)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in (cooler, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    cooler.join(60)
    assert not wrong and arena.free_bytes == arena.max_bytes


def test_a_descriptor_cannot_be_written_through_unless_writers_are_allowed() -> None:
    arena = Arena(4 * MB)
    try:
        assert receive_descriptor(arena.name, 2.0, writable=True) is None
        received = receive_descriptor(arena.name, 2.0)
        assert received is not None
        descriptor, size = received
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE)
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        mmap.mmap(descriptor, size, access=mmap.ACCESS_READ).close()
        os.close(descriptor)
        arena.allow_writers()
        received = receive_descriptor(arena.name, 2.0, writable=True)
        assert received is not None
        mmap.mmap(received[0], size, access=mmap.ACCESS_WRITE).close()
        os.close(received[0])
    finally:
        arena.close()


def test_arrays_are_writable_as_asked_even_where_the_memory_is_not() -> None:
    arena = Arena(16 * MB)
    places = [arena.place([batch(value)]) for value in range(3)]
    first, second, third = (one for one in places if one is not None)
    careful, refused = SlabReader.connect(arena.name, writable=False), SlabReader.connect(arena.name)
    assert careful is not None and refused is not None
    (seen,), (own,) = careful.claim(first).arrays(), refused.claim(second).arrays()
    assert not seen.flags.writeable and own.flags.writeable
    own[...] = 0
    assert refused.returned() == (second.lease,), "it is a copy"
    arena.allow_writers()
    allowed = SlabReader.connect(arena.name)
    arena_closed = SlabReader.connect(arena.name)
    assert allowed is not None and arena_closed is not None
    (in_place,) = allowed.claim(third).arrays()
    assert in_place.flags.writeable and allowed.returned() == ()
    arena.close()
    (left,) = arena_closed.claim(second).arrays()
    assert left.flags.writeable and (left.view(np.float32) == 1).all()


def test_what_arrived_and_is_never_looked_at_is_given_back(arena: Arena, reader: SlabReader) -> None:
    places = arena.place([batch(1)])
    assert places is not None
    unseen = reader.claim(places)
    assert reader.returned() == ()
    del unseen
    assert reader.returned() == (places.lease,)


def test_what_never_arrived_is_given_back_with_the_next_connection(arena: Arena, reader: SlabReader) -> None:
    first, other = reader.open_connection(), reader.open_connection()
    sent = [arena.place([batch(1)], Holder(reader.name, first.connection)) for _ in range(3)]
    on_other = arena.place([batch(1)], Holder(reader.name, other.connection))
    strangers = arena.place([batch(1)], Holder("stranger", 1))
    assert sent[0] is not None and sent[1] is not None and on_other is not None and strangers is not None
    held, ended = reader.claim(sent[0]), reader.claim(sent[1])
    del ended
    reader.returned()  # and what was to say so is lost with the connection
    last_word = reader.close_connection(first.connection)
    assert last_word.over and last_word.held == (held.lease,) and last_word.live == (other.connection,)
    using = reader.open_connection()
    assert using.held == (held.lease,) and using.live == (other.connection,)
    newest = arena.place([batch(1)], Holder(reader.name, using.connection + 1))
    assert newest is not None, "of a connection whose first message came before this one's"
    arena.leases.keep_only(using.held, Holder(using.reader, using.connection), using.live)
    assert len(arena.leases) == 4
    arena.leases.remove([held.lease, on_other.lease, strangers.lease, newest.lease])
    assert len(arena.leases) == 0


def test_much_that_is_to_be_given_back_does_not_wait(arena: Arena, reader: SlabReader) -> None:
    claimed = []
    for _ in range(4):
        places = arena.place([batch(1, size=RETURN_BYTES // 4)])
        assert places is not None
        claimed.append(reader.claim(places))
    while claimed:
        assert not reader.owes_much
        claimed.pop()
    assert reader.owes_much and len(reader.returned()) == 4 and not reader.owes_much


_SHUTDOWN = """
import numpy as np
from penstock.wire.leases import SlabReader
from penstock.wire.slabs import Arena

arena = Arena(64 << 20)
arena.allow_writers()
made = arena.array((1 << 20,), np.float32)
reader = SlabReader.connect(arena.name)
(array,) = reader.claim(arena.place([np.full(1 << 20, 7, np.float32)])).arrays()
"""
_KEPT_TO_THE_END = """
import sys
sys.modules["os"].kept = [made, array]  # let go of when modules are emptied
"""
_KEPT_BY_TORCH = """
import torch
torch.kept = [torch.from_numpy(array.view(np.float32)), torch.from_numpy(made)]
assert float(torch.kept[0][5]) == 7.0
"""


@pytest.mark.parametrize("keeping", [_KEPT_TO_THE_END, _KEPT_BY_TORCH], ids=["modules", "torch"])
def test_arrays_that_live_to_the_interpreters_end_say_nothing(keeping: str) -> None:
    if "torch" in keeping:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", _SHUTDOWN + keeping], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
