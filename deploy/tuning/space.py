"""The file of a search: a job, and ranges of its keys."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from deploy.tuning.selection_checks import check_selection
from federation.errors import JobError
from federation.ids import check_name
from federation.job import code_files, job_file
from federation.job.job_keys import key
from federation.job.spec import JobSpec
from federation.rounds.local_work import is_auto
from privacy.dp.selection import DISTRIBUTIONS, RandomTrials

SAMPLERS = ("tpe", "cma_es", "evolutionary", "random")
# Metrics whose goal is known.
_GOALS = {"loss": "min", "accuracy": "max"}

# Keys that say what a run may spend.
_CAPS = {
    f"privacy.differential_privacy.{name}"
    for name in ("unit", "target_epsilon", "delta")
}

# What a search's file calls facts that have another name.
_KEYS_OF_FACTS = {"selection": "privacy.selection and trials"}

Choice = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSpec:
    """The values that one key may take.

    Attributes:
        low: Smallest value. Two whole numbers give whole numbers.
        high: Largest value.
        step: Distance between values; none by default, 1 for whole numbers.
        log: Draw evenly on a logarithmic axis.
        choices: A list of values, in place of `low` and `high`.
    """

    low: Any = None
    high: Any = None
    step: Any = None
    log: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return all(isinstance(end, int) for end in (self.low, self.high))

    def ends(self) -> tuple[Any, ...]:
        """Values that a job must accept if it is to accept all of them."""
        return self.choices or (self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunerSpec:
    """When a trial ends early: successive halving (Li et al., arXiv:1810.05934).

    Attributes:
        min_rounds: Rounds of a trial before the first comparison. Later ones are after
            `factor`, `factor`², ... times as many. 0: no trial ends early.
        factor: One trial of so many goes on after a comparison.
    """

    min_rounds: int = key(default=0, low=0)
    factor: int = key(default=3, low=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalPrivacySpec:
    """What all trials together may spend, where the job has differential privacy.

    Attributes:
        max_epsilon: No trial starts that could take a site beyond this epsilon. 0: no
            limit; the total is counted and shown all the same.
        delta: The delta that goes with it. Default: twice the largest that a ledger
            has.
        selection: Draw the number of trials at random, secretly, with `trials` as its
            mean, and state what the best trial alone reveals: `geometric`,
            `logarithmic` or `poisson`. Empty: there are exactly `trials`.
    """

    max_epsilon: float = key(default=0.0, low=0.0)
    delta: float | None = key(default=None, above=0.0, below=1.0)
    selection: str = key(default="", choices=("", *DISTRIBUTIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSpec:
    """What to search, and how.

    Attributes:
        job: The job file whose keys are searched, relative to this file.
        trials: How many runs there are; with `privacy.selection` their expected number.
        space: The keys and their values.
        name: Name of the search; by default, the job's name.
        metric: `loss`, `accuracy`, or a metric of the job's objective, of the last
            model of a run.
        goal: `min` or `max`; needed for metrics of your own, as in `[selection]`.
        sampler: How values are chosen: `tpe` (tree-structured Parzen estimators),
            `cma_es` (numbers only), `evolutionary` (NSGA-II) or `random`.
        seed: Seed of the choice of values; drawn secretly with `privacy.selection`.
        pruner: When a trial ends early.
        engine: `inproc`, or `virtual`: trials run in virtual time, with the speeds in
            `simulation.machines` of the job.
        privacy: What all trials may spend.
    """

    job: str
    trials: int = key(default=20, low=1, high=100_000)
    space: Mapping[str, RangeSpec]
    name: str = ""
    metric: str = "loss"
    goal: str | None = key(default=None, choices=("min", "max"))
    sampler: str = key(default="tpe", choices=SAMPLERS)
    seed: int = key(default=0, low=0)
    pruner: PrunerSpec = field(default_factory=PrunerSpec)
    engine: str = key(default="inproc", choices=("inproc", "virtual"))
    privacy: TotalPrivacySpec = field(default_factory=TotalPrivacySpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A search that can begin.

    Attributes:
        spec: What the file says, with defaults filled in.
        document: The job, without the keys that are searched.
        path: Path of the job file, beside which files of users are found.
    """

    spec: TuneSpec
    document: Mapping[str, Any]
    path: Path

    @property
    def random_trials(self) -> RandomTrials | None:
        """How the number of trials is drawn; None if it is fixed."""
        chosen = self.spec.privacy.selection
        for distribution in DISTRIBUTIONS:
            if chosen == distribution:
                return RandomTrials(
                    distribution=distribution, mean=float(self.spec.trials)
                )
        return None

    def job(self, values: Mapping[str, Choice]) -> JobSpec:
        """Return the job of a trial.

        Raises:
            JobError: These values do not fit together.
        """
        document: dict[str, Any] = json.loads(json.dumps(self.document))
        for name, value in values.items():
            job_file.override(document, name, value)
        code_files.pin(document, self.path.parent)
        job = job_file.parse(document)
        if self.spec.engine != "virtual":
            _check_fixed_steps(job)
        if goal := _goal_of_metric(self.spec, job):
            job = job_file.parse({**document, **goal})
        if job.model.weights is None:
            return job
        from clients.models.starting_weights import pinned  # noqa: PLC0415 -- imports torch

        return pinned(job, self.path.parent)

    def facts(self) -> dict[str, Any]:
        """All that decides what trials compute, as JSON has it.

        The job has the digests of users' files in it.
        """
        facts = asdict(replace(self.spec, trials=1, privacy=TotalPrivacySpec()))
        if self.spec.privacy.selection:  # Then the number of trials is drawn once.
            facts["selection"] = self.spec.privacy.selection, self.spec.trials
        facts["job"] = job_file.document(self.job({}))
        return cast("dict[str, Any]", json.loads(json.dumps(facts)))

    def digest(self) -> str:
        """SHA-256 of ``facts``."""
        facts = json.dumps(self.facts(), sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the keys in which two searches differ, with the old and the new value.

    Args:
        before: ``Space.facts`` of the search that a folder holds.
        now: Those of the one that is to continue it.
    """
    return [
        f"{_KEYS_OF_FACTS.get(name, name)}: {_change(old, new)}"
        for name, (old, new) in job_file.differing(before, now).items()
    ]


def _change(old: Any, new: Any) -> str:
    was, names = str(old), code_files.unpinned(str(new))
    if was != names and code_files.unpinned(was) == names:
        return f"the code of {names} has changed"
    return f"{old!r:.200} before, {new!r:.200} now"


def _goal_of_metric(spec: TuneSpec, job: JobSpec) -> Mapping[str, Any]:
    """The table ``selection`` that tells a trial which way the metric is better.

    A site counts NaN as the worse bound of a metric, and knows which that is of a
    metric of the user's own only from there. The table changes nothing else: the run
    leaves its last model, and does not stop early.

    Raises:
        JobError: The job has such a table, for another metric.
    """
    if spec.metric in _GOALS or spec.metric not in job.training.metrics:
        return {}
    known = job.selection
    if known is None:
        never = job.rounds + 1
        found = {"metric": spec.metric, "goal": spec.goal, "patience": never}
        return {"selection": {"model": "last", **found}}
    if (known.metric, known.goal) != (spec.metric, spec.goal):
        raise JobError(
            f"the search compares {spec.metric}, whose goal this table does not say: "
            f'set metric = "{spec.metric}" and goal = "{spec.goal}" in it, or remove '
            "it",
            key="selection",
        )
    return {}


def load(path: Path) -> Space:
    """Read a search, and try both ends of every range in the job.

    Raises:
        JobError: It cannot be read, or a key is unknown, missing or wrong; the message
            names file and key.
    """
    try:
        document = job_file.read_toml(path)
        document["space"] = dict(_flat(document.get("space")))
        return _checked(job_file.build(TuneSpec, document), path.parent)
    except JobError as error:
        if str(path) in error.reason:
            raise
        raise JobError(f"{path}: {error}") from error


def _checked(spec: TuneSpec, folder: Path) -> Space:
    for name, values in spec.space.items():
        if values.choices:
            _check_choices(f"space.{name}", values, spec.sampler)
        else:
            _check_ends(f"space.{name}", values)
    path = folder / spec.job
    document = job_file.read_toml(path)
    spec = _filled(spec, str(document.get("name", "")))
    space = Space(spec=spec, document=document, path=path)
    space.job({})  # What is wrong without any value is no fault of a range.
    if spec.engine == "virtual":
        _check_speeds(space.job({}))
    _try_ends(space)
    if spec.privacy.selection:
        check_selection(spec, space.job({}))
    if spec.privacy.max_epsilon:
        _check_budget(space)
    return space


def _check_fixed_steps(job: JobSpec) -> None:
    """Refuse a job whose local steps follow its lines, which trials here lack."""
    if is_auto(job):
        raise JobError(
            "'auto' measures lines, and trials have none: set engine to 'virtual' in "
            "the search; or, in the job, schedule.local_work = 'fixed' without "
            "max_local_steps and training_share, and search training.local_steps",
            key="schedule.local_work",
        )


def _check_speeds(job: JobSpec) -> None:
    """Refuse virtual time without the speed of a site, which would fail each trial."""
    known = {machine.site for machine in job.simulation.machines}
    for site in job.sites:
        if site.name not in known:
            raise JobError(
                f"virtual time needs the speed of every site, and {site.name!r} has "
                "none: add a table with its name and examples_per_second to the job",
                key="simulation.machines",
            )


def _check_budget(space: Space) -> None:
    """Refuse a budget if it is not known what a trial may add to what was spent."""
    private = space.job({}).privacy.differential_privacy
    if not private.enabled or private.delta is None:
        raise JobError(
            "needs a job with differential privacy, target_epsilon and delta: they are "
            "what a trial may spend",
            key="privacy.max_epsilon",
        )
    for name in _CAPS & space.spec.space.keys():
        raise JobError(
            "cannot be searched under privacy.max_epsilon: it decides what a trial may "
            "spend",
            key=f"space.{name}",
        )


def _flat(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each range by its whole key, which need not be quoted in the file."""
    if not isinstance(table, Mapping) or not table:
        raise JobError("names no key to search", key="space")
    for name, value in table.items():
        is_table = isinstance(value, Mapping)
        if is_table and not {"low", "high", "choices"} & set(value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_choices(name: str, values: RangeSpec, sampler: str) -> None:
    if replace(values, choices=()) != RangeSpec():
        raise JobError("has choices, and needs nothing else", key=name)
    if not all(isinstance(choice, Choice) for choice in values.choices):
        raise JobError("choices are texts, numbers or booleans", key=name)
    if sampler == "cma_es":
        raise JobError('sampler = "cma_es" searches numbers only', key=name)


def _check_ends(name: str, values: RangeSpec) -> None:
    low, high, step = values.low, values.high, values.step
    for end in (low, high, *([] if step is None else [step])):
        if isinstance(end, bool) or not isinstance(end, int | float):
            raise JobError("needs the numbers low and high, or choices", key=name)
    if not low < high:
        raise JobError(f"low is {low}, and must be below high, {high}", key=name)
    if values.log and (low <= 0 or step is not None):
        raise JobError("log needs a low above 0 and no step", key=name)
    if step is not None and step <= 0:
        raise JobError("step must be above 0", key=name)


def _filled(spec: TuneSpec, job_name: str) -> TuneSpec:
    goal = spec.goal or _GOALS.get(spec.metric)
    if goal is None:
        raise JobError(
            f'say whether {spec.metric} is better smaller or larger: "min" or "max"',
            key="goal",
        )
    try:
        name = check_name(spec.name or job_name)
    except ValueError as error:
        raise JobError(str(error), key="name") from error
    return replace(spec, goal=goal, name=name)


def _try_ends(space: Space) -> None:
    """Refuse a value that the job does not take, the others as in the job."""
    for name, values in space.spec.space.items():
        for value in values.ends():
            try:
                space.job({name: value})
            except JobError as error:
                raise JobError(
                    f"the job does not take {value!r}: {error}", key=f"space.{name}"
                ) from error
