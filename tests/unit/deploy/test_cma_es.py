"""The sampler of CMA-ES finds an optimum, and keeps nothing in the study."""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,  # Importing Optuna takes a second.
    pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra tune"),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    import optuna  # noqa: PLC0415 -- an extra

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def distance(trial: Any) -> float:
    """From 4, 10^-3.5 and 1, far from the middle of the ranges."""
    x = trial.suggest_float("x", -5.0, 5.0, step=0.25)
    y = trial.suggest_float("y", 1e-4, 1.0, log=True)
    z = trial.suggest_int("z", 1, 9, step=2)
    return (x - 4) ** 2 + (math.log10(y) + 3.5) ** 2 + (z - 1) ** 2 / 4


def searched(objective: Callable[[Any], float], trials: int, **study: Any) -> Any:
    """A study whose trials have samplers of their own, as in a search."""
    import optuna  # noqa: PLC0415 -- an extra

    from deploy.tuning.cma_es import CmaEs  # noqa: PLC0415 -- needs the extra

    found = optuna.create_study(**study)
    for seed in range(1, trials + 1):
        found.sampler = CmaEs(seed)
        found.optimize(objective, n_trials=1)
    return found


@pytest.mark.parametrize("sign", [1, -1])
def test_it_comes_close_to_the_optimum(sign: int):
    """In both directions; draws around the middle come no closer than 3."""
    direction = "minimize" if sign == 1 else "maximize"
    study = searched(lambda trial: sign * distance(trial), 80, direction=direction)
    assert sign * study.best_value < 0.15


def test_values_are_on_their_steps_and_within_their_ranges():
    for trial in searched(distance, 30).trials:
        x, y, z = (trial.params[name] for name in "xyz")
        assert (x * 4).is_integer()
        assert -5 <= x <= 5
        assert 1e-4 <= y <= 1
        assert z in {1, 3, 5, 7, 9}
        assert isinstance(z, int)
