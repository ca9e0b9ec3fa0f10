"""CMA-ES, whose state follows from the finished trials.

Optuna's own sampler keeps its state in the study with pickle, so a study that someone
else has written could run code. Here nothing is kept. Mean, step size and covariance
(Hansen 2016, arXiv:1604.00772) depend only on the values and results of the generations
so far, so each trial computes them again, which takes milliseconds.

Shape suffix: k keys that are searched.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from cmaes import CMA
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial, TrialState

_Numeric = FloatDistribution | IntDistribution

# Initial standard deviation, where each key's range is [0, 1].
_SIGMA = 1 / 6


class CmaEs(optuna.samplers.BaseSampler):
    """Chooses the numbers of one trial. The first trial, and one key, are random."""

    def __init__(self, seed: int) -> None:
        """Set the seed of this trial's draws."""
        self._seed = seed
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002 -- Optuna's interface
    ) -> dict[str, BaseDistribution]:
        """Return the keys that the finished trials had in common, if two or more."""
        found = intersection_search_space(study.get_trials(deepcopy=False))
        space = {name: each for name, each in found.items() if not each.single()}
        # It adapts a covariance.
        return space if len(_numeric(space)) > 1 else {}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002 -- Optuna's interface
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Draw a trial of the next generation."""
        if not search_space:
            return {}
        space = _numeric(search_space)
        size = len(space)
        optimizer = CMA(
            mean=np.full(size, 0.5),
            sigma=_SIGMA,
            bounds=np.tile([0.0, 1.0], (size, 1)),
            seed=self._seed,
        )
        sign = 1 if study.direction is optuna.study.StudyDirection.MINIMIZE else -1
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        solutions = [
            (_scaled(space, each.params), sign * float(each.value))
            for each in sorted(ended, key=lambda each: each.number)
            if each.value is not None and space.keys() <= each.params.keys()
        ]
        generation = optimizer.population_size
        for end in range(generation, len(solutions) + 1, generation):
            optimizer.tell(solutions[end - generation : end])
        return _values(space, optimizer.ask())

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw a value of its range."""
        return self._random.sample_independent(
            study, trial, param_name, param_distribution
        )


def _numeric(space: Mapping[str, BaseDistribution]) -> dict[str, _Numeric]:
    return {name: each for name, each in space.items() if isinstance(each, _Numeric)}


def _scaled(
    space: Mapping[str, _Numeric], values: Mapping[str, float]
) -> NDArray[np.float64]:
    """Bring values to [0, 1], shape ``(k,)``."""
    found = []
    for name, distribution in space.items():
        low, high = _ends(distribution)
        value = math.log(values[name]) if distribution.log else values[name]
        found.append((value - low) / (high - low))
    return np.array(found)


def _values(space: Mapping[str, _Numeric], scaled_k: Sequence[float]) -> dict[str, Any]:
    """Return what ``_scaled`` has brought to [0, 1], on the steps of each key."""
    found: dict[str, Any] = {}
    for (name, distribution), share in zip(space.items(), scaled_k, strict=True):
        low, high = _ends(distribution)
        value = low + float(share) * (high - low)
        value = math.exp(value) if distribution.log else value
        if distribution.step:
            steps = round((value - distribution.low) / distribution.step)
            value = distribution.low + steps * distribution.step
        value = min(max(value, distribution.low), distribution.high)
        is_whole = isinstance(distribution, IntDistribution)
        found[name] = round(value) if is_whole else value
    return found


def _ends(distribution: _Numeric) -> tuple[float, float]:
    """Ends of the range, half a step outside, so that each step has the same width."""
    half = (distribution.step or 0) / 2
    low, high = distribution.low - half, distribution.high + half
    return (math.log(low), math.log(high)) if distribution.log else (low, high)
