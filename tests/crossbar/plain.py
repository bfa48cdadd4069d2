"""The plain run: everything that is to come, told in this process and with the seed the service uses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from .case import Case
from .datasets import build
from .outputs import Output, Row, output_of, rows_of
from .pipelines import Pipeline, Step


def whole(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with nothing dropped and nothing endless: its rows are all there are to come."""

    def undropped(step: Step) -> Step:
        if "drop_last" in step.arguments:
            return Step(step.name, {**step.arguments, "drop_last": False})
        return step

    steps = tuple(
        undropped(step) for step in pipeline.steps if not (step.name == "repeat" and step.arguments["count"] < 0)
    )
    join = pipeline.join
    if join is not None and join.name == "mix":
        join = Step("mix", {**join.arguments, "stop": "all"})
    return replace(pipeline, steps=steps, join=join)


@dataclass(slots=True)
class Plain:
    """Runs the pipeline in this process, with the seed the service uses."""

    case: Case
    seed: int
    folder: Path

    def outputs(self, epoch: int) -> list[Output]:
        """Everything there is to come in an epoch, operators after `distribute` included."""
        steps = tuple(step for step in self.case.pipeline.steps if step.name != "autocache")  # it changes nothing
        uncounted = tuple(step for step in self.case.modes.after if step.name not in ("take", "skip", "enumerate"))
        pipeline = whole(replace(self.case.pipeline, steps=(*steps, *uncounted)))
        dataset = build(pipeline, self.folder)
        with dataset.iterator(epoch=epoch, seed=self.seed) as iterator:
            return [output_of(element) for element in iterator]

    def rows(self, epoch: int) -> Counter[Row]:
        return rows_of(self.outputs(epoch))

    def error(self) -> BaseException | None:
        """Return what the pipeline raises here, None if nothing."""
        dataset = build(self.case.pipeline, self.folder)
        try:
            with dataset.iterator(epoch=0, seed=self.seed) as iterator:
                for number, _ in enumerate(iterator):
                    if number == self.case.limit:
                        return None
        except BaseException as error:
            return error
        return None
