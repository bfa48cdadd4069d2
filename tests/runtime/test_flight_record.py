from __future__ import annotations

import mmap
import os

from penstock.core.ids import StreamId
from penstock.processes.nursery_link import RECORD_BYTES
from penstock.runtime.contract import Origin
from penstock.runtime.flight_record import FlightRecord, HangWatch, read_flight


def test_what_a_killed_process_was_working_on_is_read_from_its_record() -> None:
    memory = mmap.mmap(-1, RECORD_BYTES)
    pid = os.fork()
    if pid == 0:
        recorder = FlightRecord(memory).recorder(StreamId("attempt.3"))
        recorder.end(recorder.begin(Origin(1, 10), 5))
        recorder.begin(Origin(2, 77, source=1), 4)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    (found,) = read_flight(memory)
    assert found.plain() == ("attempt.3", 1, 2, 77, 4)


def test_a_record_that_was_never_written_says_nothing() -> None:
    assert read_flight(bytes(RECORD_BYTES)) == ()
    assert read_flight(b"") == ()


def test_more_threads_than_slots_are_not_recorded() -> None:
    record = FlightRecord(bytearray(16 + 2 * 128))
    recorder = record.recorder(StreamId("s"))
    tokens = [recorder.begin(Origin(i, 0), 1) for i in range(3)]
    assert len(record.in_flight()) == 2
    for token in tokens:
        recorder.end(token)
    assert record.in_flight() == ()


def test_work_that_hangs_is_named_once() -> None:
    record = FlightRecord(bytearray(RECORD_BYTES))
    record.recorder(StreamId("s")).begin(Origin(4, 2), 1)
    (work,) = record.in_flight()
    watch = HangWatch(60.0)
    assert watch.overdue([work], work.began + 59) == []
    assert watch.overdue([work], work.began + 61) == [work]
    assert watch.overdue([work], work.began + 62) == []
