"""Private selection of a search's best trial: what it needs, costs and releases.

The number of trials and the seed of their values are drawn secretly, once for each
search. What may be shown is in ``selected/``; all else in the search's folder reveals
the other trials, or how many there were.
"""

import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_adapters.storage.disk.part_file import file_errors
from cloud_adapters.storage.disk.transfer import FilePieces
from deploy.tuning.space import Choice, Space
from deploy.tuning.spending import Spender
from federation.durable_files import replace_file
from federation.errors import PrivacyError
from monitoring.runs.run_folder import RunFolder
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.selection import RandomTrials, epsilon_of_best

FOLDER, MODEL, RESULT = "selected", "model.safetensors", "result.json"

_SEED_BITS = 128
# The noise in force is a little more than was planned, by as much as the grid of a
# trial's clip norm rounds: less than this part of it.
_NOISE_MARGIN = 2.0**-10

TrialEvents = Mapping[Spender, Sequence[PrivacyEvent]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionDraw:
    """What is drawn secretly when a search begins.

    Attributes:
        trials: How many there are.
        seed: Seed of their values.
    """

    trials: int
    seed: int

    @classmethod
    def fresh(cls, wanted: RandomTrials) -> "SelectionDraw":
        """Draw from the operating system."""
        return cls(trials=wanted.draw(), seed=secrets.randbits(_SEED_BITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionCost:
    """What the best trial of a search reveals, alone and with all others.

    Attributes:
        distribution: That the number of trials was drawn from.
        mean: Expected number of trials.
        epsilon: For those who see the best trial and nothing else of the search.
        composed: For those who see all trials, if there were as many as expected.
        delta: The delta of both.
    """

    distribution: str
    mean: float
    epsilon: float
    composed: float
    delta: float


def worst_events(
    trials: Iterable[Sequence[PrivacyEvent]], best: Iterable[PrivacyEvent]
) -> tuple[PrivacyEvent, ...]:
    """Events of a trial that costs as much as any with other values would.

    What may be searched changes no event but for the rounding of its noise. A trial
    that repeated rounds after a crash has more steps, and one that failed has fewer.

    The noise is that of the best trial, less what rounding may add to any. The least
    noise of all trials would be less, the more trials there were, and the epsilon that
    is released would say how many.

    Args:
        trials: What each trial has released for one purpose.
        best: What the one has that is released.
    """
    steps: dict[tuple[float, float], int] = {}
    noise = {
        (event.sampling_rate, event.slack): event.noise_multiplier for event in best
    }
    for events in trials:
        here: dict[tuple[float, float], int] = {}
        for event in events:
            kind = event.sampling_rate, event.slack
            here[kind] = here.get(kind, 0) + event.steps
            noise.setdefault(kind, event.noise_multiplier)
        for kind, count in here.items():
            steps[kind] = max(steps.get(kind, 0), count)
    return tuple(
        PrivacyEvent(
            noise_multiplier=noise[kind] * (1 - _NOISE_MARGIN),
            sampling_rate=kind[0],
            steps=count,
            slack=kind[1],
        )
        for kind, count in steps.items()
    )


def cost(
    trials: Sequence[TrialEvents], best: TrialEvents, wanted: RandomTrials, delta: float
) -> SelectionCost:
    """What the best of some trials reveals: the most of any site and purpose.

    Args:
        trials: What each trial has released.
        best: What the best one of them has.
        wanted: How their number was drawn.
        delta: That goes with both epsilons.
    """
    spenders = {spender for trial in trials for spender in trial}
    worst = [
        worst_events(
            [trial.get(spender, ()) for trial in trials], best.get(spender, ())
        )
        for spender in spenders
    ]
    expected = math.ceil(wanted.mean)
    return SelectionCost(
        distribution=wanted.distribution,
        mean=wanted.mean,
        epsilon=max(
            (epsilon_of_best(events, delta, wanted) for events in worst), default=0.0
        ),
        composed=max(
            (accountant.epsilon(events * expected, delta) for events in worst),
            default=0.0,
        ),
        delta=delta,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRelease:
    """The best trial of a search with private selection.

    Attributes:
        cost: What it reveals.
        folder: Holds what may be shown.
    """

    cost: SelectionCost
    folder: Path


def release(
    folder: Path,
    space: Space,
    *,
    run: RunFolder,
    values: Mapping[str, Choice],
    value: float | None,
    found: SelectionCost,
) -> SelectionRelease:
    """Write what may be shown of a search: model, values, metric and guarantee.

    Neither the number of trials nor the place of the best one among them, nor a time or
    a name that follows from these.

    Args:
        folder: Folder of the search.
        space: What was searched.
        run: Run of the best trial.
        values: Values of the keys that were searched.
        value: The metric of the best trial.
        found: What it costs.

    Returns:
        Where it is, and what it costs.

    Raises:
        PrivacyError: There is no bound, so nothing may be released.
        StoreUnavailable: The folder cannot be written.
    """
    if not math.isfinite(found.epsilon):
        raise PrivacyError(
            f"{folder}: no epsilon bounds what the best trial reveals at delta "
            f"{found.delta:g}, so nothing is released: give the job more noise (a "
            "smaller target_epsilon), or a larger privacy.delta"
        )
    place = folder / FOLDER
    document: dict[str, Any] = {
        "name": space.spec.name,
        "metric": space.spec.metric,
        "value": value,
        "values": dict(values),
        "unit": space.job({}).privacy.differential_privacy.unit,
        "epsilon": found.epsilon,
        "delta": found.delta,
        "distribution": found.distribution,
        "expected_trials": found.mean,
    }
    text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with file_errors("write", place):
        place.mkdir(exist_ok=True)
        replace_file(place / MODEL, FilePieces(run.model))
        replace_file(place / RESULT, [text.encode()])
        # When a search ended says how long it was. The folder comes last.
        for written in (place / MODEL, place / RESULT, place):
            os.utime(written, (0, 0))
    return SelectionRelease(cost=found, folder=place)
