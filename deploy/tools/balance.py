"""How evenly sites are loaded, from the speeds that a run measured.

Sites that train whole epochs of their data are done at the same time if each holds as
many examples as its speed says; until then the fast ones wait for the slowest. What is
here reads, counts and predicts; splitting is in ``clients.data.partition``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from clients.data.partition import cuts
from federation.errors import SiteError
from federation.events import SiteAnswered
from federation.job.spec import JobSpec, TrainingSpec
from federation.rounds.local_work import in_round
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import RunView

_DIGITS = 4  # Rounds differ by more.


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLoad:
    """One site's work and speed.

    Attributes:
        site: Its name.
        examples: Training examples that it holds.
        speed: Examples a second.
        load: Its share of the examples over its share of the speed: 1 everywhere if
            the work is even, and above 1 where others wait.
        seconds: That it takes for one epoch.
    """

    site: str
    examples: int
    speed: float
    load: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly all sites are loaded.

    Attributes:
        sites: Each of them.
        seconds: One epoch at all sites at the same time: that of the slowest.
        idle: Share of the sites' time that they wait for the slowest, 0 to 1.
    """

    sites: tuple[SiteLoad, ...]
    seconds: float
    idle: float


def balance(examples: Mapping[str, int], speeds: Mapping[str, float]) -> Balance:
    """Predict the sites' times from examples and speeds.

    Args:
        examples: Training examples of each site; at least one site has some.
        speeds: Examples a second of each of these sites, above 0.

    Raises:
        SiteError: A site has no speed.
        ValueError: A speed is not above 0, or there is no example.
    """
    for site in examples:
        if site not in speeds:
            raise SiteError(
                f"the speed of site {site!r} was not measured: run a job with it, and "
                "give that run"
            )
        if not 0 < speeds[site] < float("inf"):
            raise ValueError(f"a speed of {speeds[site]} is not possible")
    total, capacity = sum(examples.values()), sum(speeds[site] for site in examples)
    if total < 1:
        raise ValueError("there are no examples to split")
    loads = tuple(
        SiteLoad(
            site=site,
            examples=number,
            speed=speeds[site],
            load=(number / total) / (speeds[site] / capacity),
            seconds=number / speeds[site],
        )
        for site, number in examples.items()
    )
    slowest = max(load.seconds for load in loads)
    return Balance(
        sites=loads,
        seconds=slowest,
        idle=1 - fmean(load.seconds for load in loads) / slowest,
    )


def proportional(num_examples: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """Examples of each site under ``partition.kind = "proportional"``."""
    shares_k = np.array(list(speeds.values())) / sum(speeds.values())
    ends = [0, *cuts(shares_k, num_examples).tolist(), num_examples]
    return dict(zip(speeds, np.diff(ends).tolist(), strict=True))


def measured_speeds(view: RunView, job: JobSpec) -> dict[str, float]:
    """Examples a second at which each site trained: the median of its rounds.

    A site's wait for its data counts, that for others and for the network does not.

    Args:
        view: A run.
        job: The job that was run.

    Raises:
        SiteError: A site has not finished a round, or the run hides what each took.
    """
    if view.data is None:
        raise SiteError("the run ended before its data was split: give another run")
    examples = {share.site: share.train_examples for share in view.data.shares}
    found: dict[str, list[float]] = {site: [] for site in examples}
    for row in view.rounds:
        for report in row.reports:
            if isinstance(report, SiteAnswered) and report.site in found:
                training = in_round(job, report.round_index).training
                speed = _speed(report, training, examples[report.site])
                if speed is not None:
                    found[report.site].append(speed)
    missing = [repr(site) for site, speeds in found.items() if not speeds]
    if not missing:
        return {site: median(speeds) for site, speeds in found.items()}
    if view.is_secret or view.privacy is not None:
        raise SiteError(
            "with secure aggregation or differential privacy sites do not report how "
            "long they trained: measure with a run of a few rounds without them (for "
            "one of the two, --set privacy.secure_aggregation.enabled=false)"
        )
    raise SiteError(
        f"the run has no finished training of site {', '.join(missing)}: run it until "
        "every site has answered, or give another run"
    )


def _speed(
    answer: SiteAnswered, training: TrainingSpec, num_examples: int
) -> float | None:
    seconds = sum(p.seconds for p in answer.phases if p.name == "train")
    if answer.num_steps is None or seconds <= 0:
        return None
    if training.local_epochs is not None:
        return training.local_epochs * num_examples / seconds
    per_step = min(training.batch_size, num_examples) * training.accumulate
    return answer.num_steps * per_step / seconds


def of_run(run: RunFolder) -> dict[str, Any]:
    """Return how evenly the sites of a run were loaded, and how they could be.

    Raises:
        RunNotFound: There is no run, or it has lost its job file.
        SiteError: It does not tell every site's speed.
    """
    view, job = run.view(), run.read_spec()
    speeds = {site: _rounded(v) for site, v in measured_speeds(view, job).items()}
    shares = view.data.shares if view.data is not None else ()
    examples = {share.site: share.train_examples for share in shares}
    found: dict[str, Any] = {
        "run": view.started.run_id,
        "same_steps": job.training.local_steps is not None,
        "now": asdict(balance(examples, speeds)),
        "speeds": None,
        "proportional": None,
    }
    dealt = [site.name for site in job.sites if site.data is None]
    if dealt:
        theirs = {site: speeds[site] for site in dealt}
        even = proportional(sum(examples[site] for site in dealt), theirs)
        found["speeds"] = list(theirs.values())
        found["proportional"] = asdict(balance(examples | even, speeds))
    return found


def _rounded(speed: float) -> float:
    return float(f"{speed:.{_DIGITS}g}")
