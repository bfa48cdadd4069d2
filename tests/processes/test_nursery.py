"""Nurseries and their children, as real processes: started, watched, started again, and nothing survives."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import nursery_children
import pytest
from tests.waiting import is_alive, wait_gone

from penstock.core.errors import NurseryGoneError
from penstock.processes.nursery_link import (
    Died,
    EndNursery,
    NurseryLink,
    Prepare,
    Ready,
    Reported,
    Spawn,
    Spawned,
    Stop,
    TellChild,
)
from penstock.processes.nursery_start import start_nursery

DEADLINE_S = 90.0


def entry(function) -> str:
    return f"nursery_children:{function.__name__}"


def wait_for(link: NurseryLink, kind, id: str | None = None):
    """Return the next event of a kind (of a child); earlier ones are dropped."""
    deadline = time.monotonic() + DEADLINE_S
    while (left := deadline - time.monotonic()) > 0:
        event = link.receive(left)
        if isinstance(event, kind) and (id is None or event.id == id):
            return event
    raise AssertionError(f"no {kind.__name__} of {id} in {DEADLINE_S} s")


@contextlib.contextmanager
def running_nursery() -> Iterator[tuple[subprocess.Popen, NurseryLink]]:
    process, end = start_nursery()
    link = NurseryLink(end)
    try:
        link.send(Prepare(path=tuple(sys.path)))
        yield process, link
    finally:
        link.close()
        try:
            process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def nursery():
    with running_nursery() as (process, link):
        yield process, link


def spawn_ready(
    link: NurseryLink, id: str = "a", function=nursery_children.say_ready_and_wait, **more
) -> tuple[int, str]:
    link.send(Spawn(id=id, entry=entry(function), config=more.pop("config", b"hello"), **more))
    pid = wait_for(link, Spawned, id).pid
    return pid, wait_for(link, Ready, id).text


def test_a_child_runs_its_function_with_a_typed_config(nursery, tmp_path):
    _, link = nursery
    config = nursery_children.Note(path=str(tmp_path / "note"), text="hello")
    link.send(Spawn(id="a", entry=entry(nursery_children.write), config=msgspec.msgpack.encode(config)))
    spawned = wait_for(link, Spawned, "a")
    died = wait_for(link, Died, "a")
    assert (died.pid, died.code, died.again) == (spawned.pid, 0, False)
    assert (tmp_path / "note").read_text() == "hello"


def test_a_child_says_when_it_is_ready(nursery):
    _, link = nursery
    pid, text = spawn_ready(link)
    assert text == f"hello {pid}"
    assert Path(f"/proc/{pid}/comm").read_text() == "ps-a\n"
    (line,) = link.children()
    assert (line.id, line.pid, line.ready, line.starts) == ("a", pid, text, 1)


def test_a_child_reports_what_it_likes(nursery):
    _, link = nursery
    link.send(Spawn(id="a", entry=entry(nursery_children.report_twice), config=b""))
    assert [wait_for(link, Reported, "a").text for _ in range(2)] == ["one", "two lines"]
    wait_for(link, Ready, "a")


def test_a_child_that_is_stopped_before_it_started_is_reported_dead(nursery):
    _, link = nursery
    link.send(Spawn(id="a", entry=entry(nursery_children.say_ready_and_wait), config=b""))
    link.send(Stop(id="a", grace_s=0.0))  # the nursery is still importing
    assert wait_for(link, Died, "a").code < 0
    assert link.children() == ()


def test_the_environment_of_a_child_is_tuned(nursery):
    _, link = nursery
    pid, _ = spawn_ready(link)
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"MALLOC_ARENA_MAX=1" in environment and b"OPENBLAS_NUM_THREADS=1" in environment


def test_death_is_reported_with_its_cause(nursery):
    _, link = nursery
    link.send(Spawn(id="fails", entry=entry(nursery_children.fail), config=b"no luck\ntoday"))
    died = wait_for(link, Died, "fails")
    assert (died.code, died.failure) == (1, "RuntimeError: no luck today")
    link.send(Spawn(id="leaves", entry=entry(nursery_children.leave), config=b"3"))
    assert wait_for(link, Died, "leaves").code == 3
    link.send(Spawn(id="absent", entry="no_such_module:run", config=b""))
    assert "no_such_module" in wait_for(link, Died, "absent").failure
    pid, _ = spawn_ready(link, "killed")
    os.kill(pid, signal.SIGKILL)
    assert wait_for(link, Died, "killed").code == -signal.SIGKILL


def test_what_a_child_left_in_shared_memory_is_read_after_its_death(nursery):
    _, link = nursery
    link.send(Spawn(id="a", entry=entry(nursery_children.leave_a_record), config=b"element 7", record=True))
    died = wait_for(link, Died, "a")
    assert died.code == -signal.SIGSEGV
    assert died.record.rstrip(b"\0") == b"element 7" and len(died.record) == 64 << 10


def test_a_child_is_started_again_with_the_same_config(nursery):
    _, link = nursery
    first, _ = spawn_ready(link, restart=True)
    os.kill(first, signal.SIGKILL)
    assert wait_for(link, Died, "a").again
    second = wait_for(link, Spawned, "a").pid
    assert second != first
    assert wait_for(link, Ready, "a").text == f"hello {second}"
    link.send(Stop(id="a", grace_s=5))
    assert not wait_for(link, Died, "a").again


def test_a_child_that_keeps_failing_is_started_less_and_less_often(nursery):
    _, link = nursery
    link.send(Spawn(id="a", entry=entry(nursery_children.leave), config=b"1", restart=True))
    times = []
    for _ in range(4):
        wait_for(link, Spawned, "a")
        times.append(time.monotonic())
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[0] >= 0.09 and pauses[1] >= 0.19 and pauses[2] >= 0.39


def test_a_child_that_ignores_sigterm_is_killed(nursery):
    _, link = nursery
    spawn_ready(link, "deaf", nursery_children.ignore_sigterm, restart=True)
    spawn_ready(link, "polite")
    link.send(Stop(id="deaf", grace_s=0.2))
    link.send(Stop(id="polite", grace_s=60))
    assert wait_for(link, Died, "polite").code == -signal.SIGTERM
    assert wait_for(link, Died, "deaf").code == -signal.SIGKILL
    assert link.children() == ()


def test_children_of_a_child_die_with_it(nursery):
    _, link = nursery
    pid, grandchild = spawn_ready(link, "parent", nursery_children.spawn_another, nursery=True, restart=True)
    assert {line.id for line in link.children()} == {"parent", "grandchild"}
    os.kill(pid, signal.SIGKILL)
    wait_gone(int(grandchild))
    again = wait_for(link, Ready, "parent").text  # its successor starts anew
    assert is_alive(int(again))


def test_a_child_with_a_link_can_be_told_things(nursery):
    _, link = nursery
    spawn_ready(link, "parent", nursery_children.spawn_another, nursery=True)
    link.send(TellChild(id="parent", body=b"more"))
    assert wait_for(link, Ready, "parent").text == "told more"


def test_a_child_has_no_descriptors_of_the_nursery_or_of_other_children(nursery):
    _, link = nursery
    spawn_ready(link, "a")
    spawn_ready(link, "b", nursery_children.spawn_another, nursery=True)
    _, kinds = spawn_ready(link, "c", nursery_children.list_descriptors)
    assert kinds.split().count("socket") == 0
    assert "anon_inode" not in kinds


def test_children_draw_different_random_numbers(nursery):
    _, link = nursery
    drawn = [spawn_ready(link, id, nursery_children.draw)[1].split() for id in "ab"]
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]


def test_nothing_is_left_after_the_end(nursery, tmp_path):
    process, link = nursery
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    link.send(Prepare(scratch=str(scratch)))
    pids = [spawn_ready(link, "deaf", nursery_children.ignore_sigterm, grace_s=0.2)[0], spawn_ready(link, "a")[0]]
    pids.append(int(spawn_ready(link, "program", nursery_children.start_a_program)[1]))
    link.send(EndNursery())
    process.wait(DEADLINE_S)
    wait_gone(*pids)
    assert not scratch.exists()
    with pytest.raises(NurseryGoneError):
        while True:
            link.receive(DEADLINE_S)


def test_children_die_with_a_killed_nursery(nursery):
    process, link = nursery
    pids = [spawn_ready(link, "a", restart=True)[0], spawn_ready(link, "b")[0]]
    process.kill()
    wait_gone(*pids)


def test_everything_dies_with_a_killed_starter(tmp_path):
    """The starter has forked a copy of itself, which holds its end of the link: its death must be seen all the same."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from penstock.processes.nursery_link import NurseryLink
from penstock.processes.nursery_link import Prepare, Ready, Spawn
from penstock.processes.nursery_start import start_nursery
process, end = start_nursery()
link = NurseryLink(end)
link.send(Prepare(path=tuple(sys.path), scratch={str(tmp_path / "scratch")!r}))
link.send(Spawn(id="a", entry="nursery_children:say_ready_and_wait", config=b"", restart=True))
while not isinstance(event := link.receive(30), Ready):
    assert event
copy = os.fork()
if not copy:
    time.sleep(60)
    os._exit(0)
print(process.pid, event.text, copy, flush=True)
time.sleep(60)
"""
    (tmp_path / "scratch").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        nursery, child, copy = map(int, starter.stdout.readline().split())
        starter.kill()
        starter.wait()
        try:
            wait_gone(nursery, child)
            assert not (tmp_path / "scratch").exists()
        finally:
            os.kill(copy, signal.SIGKILL)


def test_a_nursery_outlives_the_thread_that_started_it():
    """A parent-death signal would follow that thread."""
    started: list = []
    thread = threading.Thread(target=lambda: started.append(start_nursery()))
    thread.start()
    thread.join()
    process, end = started[0]
    link = NurseryLink(end)
    try:
        link.send(Prepare(path=tuple(sys.path)))
        spawn_ready(link)
        assert process.poll() is None
    finally:
        link.send(EndNursery())
        process.wait(DEADLINE_S)
        link.close()


def test_a_starter_that_does_not_read_does_not_stop_the_nursery(nursery):
    _, link = nursery
    for number in range(300):  # more events than the socket holds
        link.send(Spawn(id=str(number), entry=entry(nursery_children.leave), config=b"0", record=True))
    pid, _ = spawn_ready(link, "last")
    assert is_alive(pid)
