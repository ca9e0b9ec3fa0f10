"""Run a job in virtual time, and read what studies compare from its events."""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from clients.data import Examples, digits
from deploy.wiring.simulation import simulate
from federation.events import (
    Event,
    ModelEvaluated,
    RoundFinished,
    RunFinished,
    SiteAnswered,
    SitesPaid,
)
from federation.job.spec import JobSpec


@dataclass(frozen=True)
class VirtualRun:
    """A run and its events.

    Attributes:
        job: What was run.
        events: What happened.
    """

    job: JobSpec
    events: tuple[Event, ...]

    @cached_property
    def answers(self) -> list[SiteAnswered]:
        """Updates that counted: those of a lost round do not."""
        made = {one.round_index for one in self.rounds if one.status == "completed"}
        answers = (event for event in self.events if isinstance(event, SiteAnswered))
        return [answer for answer in answers if answer.round_index in made]

    @cached_property
    def rounds(self) -> list[RoundFinished]:
        """Rounds, in order."""
        return [event for event in self.events if isinstance(event, RoundFinished)]

    @property
    def seconds(self) -> float:
        """Virtual time of the run."""
        (end,) = (event for event in self.events if isinstance(event, RunFinished))
        return end.seconds

    @property
    def round_seconds(self) -> float:
        """The same without evaluation: of the first model, and after the last round."""
        return self.seconds_until(self.rounds[-1])

    def seconds_until(self, end: RoundFinished) -> float:
        """Virtual time of the rounds up to one, without evaluation of the first model.

        Args:
            end: The last of them.
        """
        first = [one for one in self.answers if one.round_index == 1]
        phases = [phase for one in first for phase in one.phases]
        evaluated = (phase.seconds for phase in phases if phase.name == "evaluate")
        return end.at - max(evaluated, default=0.0)

    @property
    def evaluations(self) -> list[ModelEvaluated]:
        """Models on the held-out data of all sites that evaluated them."""
        return [event for event in self.events if isinstance(event, ModelEvaluated)]

    @property
    def evaluated(self) -> ModelEvaluated:
        """The last one."""
        return self.evaluations[-1]

    @property
    def loss(self) -> float:
        """Of the last model, in nats."""
        pooled = self.evaluated.pooled
        return pooled.loss_sum / pooled.count

    @property
    def accuracy(self) -> float:
        """Of the last model, from 0 to 1."""
        pooled = self.evaluated.pooled
        return pooled.metrics["correct"] / pooled.count

    @property
    def steps(self) -> int:
        """Local steps of updates that counted."""
        return sum(answer.num_steps or 0 for answer in self.answers)

    @property
    def bytes_sent(self) -> int:
        """In both directions, in all rounds."""
        return sum(one.bytes_up + one.bytes_down for one in self.rounds)

    @property
    def dollars(self) -> float:
        """Of all sites, from the run's beginning to its end; of a job with prices."""
        (paid,) = (event for event in self.events if isinstance(event, SitesPaid))
        return sum(paid.dollars)

    @cached_property
    def trains(self) -> Mapping[str, float]:
        """Share of the rounds' time that each site trains, if its update counted."""
        found = dict.fromkeys((site.name for site in self.job.sites), 0.0)
        for answer in self.answers:
            found[answer.site] += sum(
                phase.seconds for phase in answer.phases if phase.name == "train"
            )
        return {site: seconds / self.round_seconds for site, seconds in found.items()}

    @property
    def busy(self) -> float:
        """The same, on average over sites."""
        return statistics.fmean(self.trains.values())


def run(
    job: JobSpec, folder: Path | None = None, *, steps: int | None = None
) -> VirtualRun:
    """Run a job in virtual time.

    Args:
        job: What to run.
        folder: Where to keep the run.
        steps: Local steps that count, after which it ends; None for all rounds.
    """
    events: list[Event] = []

    def is_enough() -> bool:
        return steps is not None and VirtualRun(job, tuple(events)).steps >= steps

    simulate(
        job,
        engine="virtual",
        folder=folder,
        listeners=[events.append],
        stop_requested=is_enough,
        report=False,
    )
    return VirtualRun(job, tuple(events))


def models(folder: Path) -> Iterator[tuple[int, dict[str, NDArray[np.float32]]]]:
    """Yield each round and its model, of a run that has kept all checkpoints."""
    for path in sorted(folder.glob("checkpoints/round-*.json")):
        weights = json.loads(path.read_text())["blobs"]["weights"]["key"]
        round_index = int(path.stem.removeprefix("round-"))
        yield round_index, load_file(folder / "checkpoints" / weights)


def digits_again(times: int) -> tuple[Examples, Examples]:
    """Handwritten digits, several times over: so that many sites have some each."""
    train, held_out = (_again(part, times) for part in digits(0.5))
    return train, held_out


def _again(part: Examples, times: int) -> Examples:
    assert part.targets is not None
    inputs = np.concatenate([part.inputs] * times)
    return Examples(inputs=inputs, targets=np.concatenate([part.targets] * times))
