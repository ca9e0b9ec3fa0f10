"""Many simulated sites from a few numbers: the table ``simulation.fleet``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from federation.job.spec import FleetSpec

# A normal variable is within so many standard deviations 19 times of 20.
_MOST_DEVIATIONS = 1.96
_DRAWN = ("examples_per_second", "down_mbit", "up_mbit", "latency_seconds")


def drawn(fleet: FleetSpec, seed: int) -> Mapping[str, list[dict[str, Any]]]:
    """Draw the sites of a fleet and their machines.

    Args:
        fleet: How many, and of which speeds: each is log-normal about its median.
        seed: The job's.

    Returns:
        Entries of ``sites`` and of ``simulation.machines``, as in a job file.
    """
    generator = np.random.default_rng([seed, fleet.sites])
    deviation = np.log(fleet.spread) / _MOST_DEVIATIONS
    factors = np.exp(deviation * generator.standard_normal((fleet.sites, len(_DRAWN))))
    digits = len(str(fleet.sites))
    names = [f"site-{number:0{digits}}" for number in range(1, fleet.sites + 1)]
    medians = {key: getattr(fleet, key) for key in _DRAWN}
    away = {"away_share": fleet.away_share, "away_seconds": fleet.away_seconds}
    machines: list[dict[str, Any]] = [
        {
            "site": name,
            **{
                key: float(medians[key] * f) for key, f in zip(_DRAWN, row, strict=True)
            },
            **away,
        }
        for name, row in zip(names, factors, strict=True)
    ]
    return {"sites": [{"name": name} for name in names], "machines": machines}
