"""A consumer with hands that note down what it says, and that give it what a runner would."""

from __future__ import annotations

from typing import Any

from penstock.core.ids import JobName, RunnerId
from penstock.stream.checkpoint import Progress
from penstock.stream.consuming import Consumer, ConsumerInstruction, Memory, Seat, TellRunner
from penstock.stream.reading import StreamReader
from penstock.wire.frames import CloseStream, Credit, OpenStream
from penstock.wire.jobs import StreamView
from penstock.wire.messages import EndStream, Rebind
from tests.stream.records import delivery, ended, job_view, rounds

MEMORY_BYTES = 8 << 20


class Hands:
    def __init__(
        self,
        *streams: StreamView,
        progress: Progress = Progress(),  # noqa: B008
        consumer: int = 0,
        memory_bytes: int = MEMORY_BYTES,
        shared_window_bytes: int = 0,
        resumed: bool = False,
        life: int = 0,
        **job: Any,
    ) -> None:
        self.consumer = Consumer(
            Seat(JobName("j"), consumer, replica=5, trainer="t", life=life),
            delivery(**job),
            progress,
            job_view(*streams),
            memory=Memory(memory_bytes, shared_window_bytes),
            first_opening=100,
            resumed=resumed,
            now=0.0,
        )

    def reader(self, number: int = 0) -> StreamReader:
        return next(each for each in self.consumer.readers.values() if each.number == number)

    # What it says

    def told(self) -> list[TellRunner]:
        return [each for each in self._say() if isinstance(each, TellRunner)]

    def messages(self) -> list[OpenStream | Credit | CloseStream | Rebind | EndStream]:
        return [each.message if isinstance(each, TellRunner) else each for each in self._say()]

    def openings(self) -> dict[int, OpenStream]:
        """What was opened, by the stream's number."""
        found = [message for message in self.messages() if isinstance(message, OpenStream)]
        return {self.consumer.readers[message.stream].number: message for message in found}

    def asked(self) -> list[Rebind | EndStream]:
        return [each for each in self._say() if not isinstance(each, TellRunner)]

    def _say(self) -> list[ConsumerInstruction]:
        return self.consumer.instructions()

    # What comes

    def follow(self, *streams: StreamView, now: float = 0.0, **more: Any) -> None:
        self.consumer.follow(job_view(*streams, **more), now)

    def hear(self, message: Any, number: int = 0, now: float = 0.0) -> None:
        """Something comes from the runner where the stream is open."""
        runner = self.reader(number).runner
        self.consumer.receive(message, None, runner or RunnerId("nobody"), now)

    def give(self, count: int = 2, number: int = 0, *, seq: int | None = None, **more: Any) -> None:
        reader = self.reader(number)
        self.hear(
            rounds(
                reader.due if seq is None else seq,
                count,
                number=number,
                binding=reader.view.binding,
                opening=reader.opening,
                **more,
            ),
            number,
        )

    def end(self, number: int = 0, *, seq: int | None = None, **more: Any) -> None:
        reader = self.reader(number)
        at = reader.due if seq is None else seq
        self.hear(ended(at, number=number, binding=reader.view.binding, opening=reader.opening, **more), number)

    # Taking

    def take(self, most: int | None = None, now: float = 0.0) -> list[tuple[int, int]]:
        """Let the trainer take what is served next, or the first of it; return (stream, round) of each."""
        serving = self.consumer.next(now)
        if serving is None:
            return []
        found = [
            (lane.number, lane.frame.header.seq + lane.start + turn)
            for turn in range(serving.rounds)
            for lane in serving.lanes
        ]
        taken = len(found) if most is None else most
        self.consumer.settle(taken)
        return found[:taken]

    def take_all(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while taken := self.take():
            found += taken
        return found
