"""The search itself: trials are runs, and Optuna chooses their values.

Optuna (Akiba et al., KDD 2019) keeps its study in an SQLite file in the search's
folder, beside the runs. A search that was killed goes on: the run of a trial that had
not ended is resumed from its newest checkpoint, with the same values. The choice of a
trial's values depends only on the seed, the trial's number and the trials before it,
so a search that was interrupted finds what an uninterrupted one finds (with one worker;
with more, the order in which trials end decides, too). With private selection, seed and
number of trials are drawn secretly when the search begins: see ``selecting``.
"""

import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from cloud_adapters.storage.disk.sqlite_url import sqlite_url
from deploy.tuning import ledger_marks
from deploy.tuning.selecting import SelectionDraw, SelectionRelease, cost, release
from deploy.tuning.space import Choice, RangeSpec, Space, TuneSpec, changes
from deploy.tuning.spending import SearchSpending, refusal, spent
from deploy.tuning.trial import REASON, TRIALS, folder_of, run_trial
from federation.errors import CorruptObject, FederationError, JobError, RunConflict
from federation.folder_lock import hold
from federation.protocols import Clock
from monitoring.pages.tuning_page import UNFINISHED, TrialRow, Tuning, write_tuning
from monitoring.runs.run_folder import RunFolder
from privacy.dp.selection import RandomTrials

if TYPE_CHECKING:
    import optuna


DATABASE = "study.db"
PAGE = "tuning.html"
# Between two pages of a search that goes on: drawing one may take as long as a trial.
PAGE_SECONDS = 10.0
_STUDY = "crossfed"
_DIGEST, _FACTS = "digest", "facts"
_TRIALS, _SEED = "trials", "seed"
# Trials that fail before any has succeeded: then it is not their values.
_MOST_FAILURES = 3
# Completed trials without which the page shows no importance.
_LEAST_RANKED = 8

Say = Callable[[str], None]
_Tell = Callable[[int], None]  # Of a trial that has ended, by its number.
_Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search and its folder.

    Attributes:
        space: What is searched.
        folder: Holds the study, the runs and the page.
        say: Called with a line for each trial that ends.
        clock: Decides when the page is drawn again.
        stop_requested: Whether to end after the trials that run.
        workers: How many trials run at a time, each in a process of its own; 1 for in
            this one.
        draw: Draws the number of trials, for private selection.
    """

    space: Space
    folder: Path
    say: Say
    clock: Clock
    stop_requested: Callable[[], bool] = lambda: False
    workers: int = 1
    draw: Callable[[RandomTrials], SelectionDraw] = SelectionDraw.fresh

    def run(self) -> Tuning:
        """Run the trials that are missing; write the page now and then, and at the end.

        Raises:
            RunConflict: The folder holds another search.
            FederationError: Another process works on it; or the first trials failed.
            CorruptObject: The study, or a ledger of a trial, is damaged or missing.
            JobError: Several workers and a privacy budget, or a budget without room.
        """
        if self.workers > 1 and self.space.spec.privacy.max_epsilon:
            raise JobError(
                "is 1 under privacy.max_epsilon: what trials that run at the same time "
                "will spend is not known when another one starts",
                key="--workers",
            )
        busy = f"another process searches in {self.folder}: wait for it, or stop it"
        with hold(self.folder / ".lock", busy):
            study = self._study()
            self._spent(study)  # Before a trial continues: its ledgers are the newest.
            tell = partial(self._tell, study, _every(PAGE_SECONDS, self.clock))
            try:
                if self.workers > 1:
                    self._side_by_side(study, tell)
                else:
                    self._one_by_one(study, tell)
            except FederationError:
                self._show(study)
                raise
            return self._show(study)

    def _study(self) -> "optuna.Study":
        """Open the study, or begin it."""
        import optuna  # noqa: PLC0415 -- an extra
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 -- Optuna's

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        spec, database = self.space.spec, self.folder / DATABASE
        try:
            study = optuna.create_study(
                storage=_storage(self.folder),
                study_name=_STUDY,
                direction=cast("_Direction", f"{spec.goal}imize"),  # Optuna's words.
                pruner=_pruner(spec),
                load_if_exists=True,
            )
        except SQLAlchemyError as error:
            why = str(getattr(error, "orig", error))
            raise CorruptObject(
                f"{database} cannot be read ({why}): restore it, or name a new folder "
                "with --out; with differential privacy, count what both have spent"
            ) from error
        if strangers := _numbers(self.folder) - {t.number for t in study.trials}:
            raise CorruptObject(
                f"{database} does not know trial {min(strangers) + 1}, whose run is in "
                f"{TRIALS}/: it was lost, or is an older copy. Restore it, or name a "
                "new folder with --out; with differential privacy, count what both "
                "have spent"
            )
        digest, known = self.space.digest(), study.user_attrs.get(_DIGEST)
        if known is None and not study.trials:
            random_trials = self.space.random_trials
            if random_trials is not None:  # Before the digest: never drawn again.
                drawn = self.draw(random_trials)
                study.set_user_attr(_TRIALS, drawn.trials)
                study.set_user_attr(_SEED, str(drawn.seed))
            study.set_user_attr(_FACTS, self.space.facts())
            study.set_user_attr(_DIGEST, digest)
        elif known != digest:
            changed = changes(study.user_attrs[_FACTS], self.space.facts())
            raise RunConflict(
                f"{self.folder} holds a search of another space or job: "
                f"{'; '.join([*changed, 'name'])} a new folder with --out, or undo the "
                "change (only `trials` may change)"
            )
        return study

    def _one_by_one(self, study: "optuna.Study", tell: _Tell) -> None:
        for trial, values in self._asked(study):
            run_trial(self.space, self.folder, trial, values, self.stop_requested)
            tell(trial.number)

    def _side_by_side(self, study: "optuna.Study", tell: _Tell) -> None:
        """Run trials in processes; only this one asks for new ones."""
        # Workers are forks of a process that has imported what all of them need.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "optuna"])
        asked, going = self._asked(study), dict[Future[None], int]()
        with ProcessPoolExecutor(self.workers, mp_context=context) as pool:
            for trial, values in asked:
                found = pool.submit(
                    _in_process, self.space, self.folder, trial.number, values, sys.path
                )
                going[found] = trial.number
                if len(going) == self.workers:
                    _collect(going, tell)
            while going:
                _collect(going, tell)

    def _asked(
        self, study: "optuna.Study"
    ) -> Iterator[tuple["optuna.Trial", Mapping[str, Choice]]]:
        """Yield trials to run: those that a process left, then new ones."""
        import optuna  # noqa: PLC0415 -- an extra

        spec = self.space.spec
        states = optuna.trial.TrialState
        for left in study.get_trials(states=(states.RUNNING,)):
            if self.stop_requested():
                return
            study.sampler = _sampler(spec, study, left.number, workers=self.workers)
            trial = optuna.Trial(study, left._trial_id)  # noqa: SLF001 -- resumes it
            yield trial, _values(trial, spec.space)
        while (number := len(study.trials)) < _wanted(spec, study):
            if self.stop_requested() or not self._may_start(study):
                return
            study.sampler = _sampler(spec, study, number, workers=self.workers)
            trial = study.ask()
            yield trial, _values(trial, spec.space)

    def _may_start(self, study: "optuna.Study") -> bool:
        """Whether the budgets have room for another trial.

        Raises:
            FederationError: The first trials failed, or no trial fits the budget.
        """
        done = _finished(study)
        if self.space.spec.privacy.selection:
            # The number of trials must not depend on records, nor may the end of the
            # search: a trial that fails is one with the worst value.
            return True
        failures = [trial for trial in done if trial.state.name == "FAIL"]
        if len(failures) == len(done) == _MOST_FAILURES:
            reason = failures[0].user_attrs.get(REASON, "of an unknown error")
            raise FederationError(
                f"the first {_MOST_FAILURES} trials failed, the first because: {reason}"
            )
        total = self.space.spec.privacy
        if not total.max_epsilon:
            return True
        why = refusal(
            self.space.job({}),
            self._spent(study),
            epsilon_cap=total.max_epsilon,
            delta=total.delta,
        )
        if why and not study.trials:
            raise JobError(why, key="privacy.max_epsilon")
        if why:
            self.say(f"no further trial: {why}")
        return not why

    def _spent(self, study: "optuna.Study") -> SearchSpending | None:
        job = self.space.job({})
        sites: list[str] = []
        if job.privacy.differential_privacy.enabled:
            sites = [site.name for site in job.sites]
        return spent(
            {
                folder_of(self.folder, trial.number): {
                    **dict.fromkeys(sites if trial.intermediate_values else []),
                    **ledger_marks.parse(trial.user_attrs),
                }
                for trial in study.trials
            }
        )

    def _tell(
        self, study: "optuna.Study", is_due: Callable[[], bool], number: int
    ) -> None:
        trial = next(t for t in study.trials if t.number == number)
        if trial.state.is_finished():
            wanted = _wanted(self.space.spec, study)
            self.say(_line(_trial(trial, self.folder), self.space.spec, wanted))
            if is_due():
                self._show(study)

    def _show(self, study: "optuna.Study") -> Tuning:
        """Write the page, and return what it shows."""
        spec, found = self.space.spec, self._spent(study)
        delta, wanted = None, _wanted(spec, study)
        if found is not None:
            delta = spec.privacy.delta or 2 * found.delta
        tuning = Tuning(
            name=spec.name,
            metric=spec.metric,
            goal=spec.goal or "",
            sampler=spec.sampler,
            wanted=wanted,
            trials=[_trial(one, self.folder) for one in study.trials],
            ranges={n: list(r.choices) or r.ends() for n, r in spec.space.items()},
            logarithmic=frozenset(n for n, r in spec.space.items() if r.log),
            importance=_importance(study),
            epsilon=None if found is None or delta is None else found.epsilon(delta),
            delta=delta,
            page=self.folder / PAGE,
            is_selected=bool(spec.privacy.selection),
        )
        write_tuning(tuning)
        return tuning

    def select(self, tuning: Tuning) -> SelectionRelease | None:
        """Release the best trial of a search with private selection.

        Args:
            tuning: What ``run`` returned.

        Returns:
            None if the search has no such selection, is not finished, or drew no trial
            or none with a result.
        """
        wanted = self.space.random_trials
        is_done = sum(t.state != UNFINISHED for t in tuning.trials) == tuning.wanted
        if wanted is None or not is_done or tuning.best is None:
            return None
        found = self._spent(self._study())
        if found is None or tuning.delta is None:
            raise CorruptObject(f"{self.folder} has no ledger of any trial")
        best = tuning.best
        return release(
            self.folder,
            self.space,
            run=RunFolder(best.folder),
            values=best.values,
            value=best.value,
            found=cost(found.trials, found.trials[best.number], wanted, tuning.delta),
        )


def _collect(going: dict["Future[None]", int], tell: _Tell) -> None:
    """Wait for a trial of those that run to end."""
    for one in wait(going, return_when=FIRST_COMPLETED).done:
        one.result()  # What was wrong with a worker ends the search.
        tell(going.pop(one))


def _every(seconds: float, clock: Clock) -> Callable[[], bool]:
    """Whether so many seconds have passed since this was last true; true at first."""
    next_at = -math.inf

    def is_due() -> bool:
        nonlocal next_at
        now = clock.monotonic()
        if now < next_at:
            return False
        next_at = now + seconds
        return True

    return is_due


def _in_process(
    space: Space,
    folder: Path,
    number: int,
    values: Mapping[str, Choice],
    path: Sequence[str],
) -> None:
    """Run a trial in a process that the search has started."""
    import optuna  # noqa: PLC0415 -- an extra

    sys.path[:] = path  # Where a user's own models and data are found.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(
        study_name=_STUDY, storage=_storage(folder), pruner=_pruner(space.spec)
    )
    study.sampler = _sampler(space.spec, study, number, workers=2)
    found = next(t for t in study.trials if t.number == number)
    trial = optuna.Trial(study, found._trial_id)  # noqa: SLF001 -- asked for elsewhere
    run_trial(space, folder, trial, values)


def _storage(folder: Path) -> "optuna.storages.RDBStorage":
    import optuna  # noqa: PLC0415 -- an extra

    return optuna.storages.RDBStorage(sqlite_url((folder / DATABASE).absolute()))


def _numbers(folder: Path) -> set[int]:
    """Numbers of the trials whose runs are there."""
    found = (folder / TRIALS).glob("*")
    return {int(path.name) - 1 for path in found if path.name.isdecimal()}


def _wanted(spec: TuneSpec, study: "optuna.Study") -> int:
    """Number of trials: the file's, or the one that was drawn secretly."""
    return int(study.user_attrs.get(_TRIALS, spec.trials))


def _sampler(
    spec: TuneSpec, study: "optuna.Study", number: int, *, workers: int
) -> "optuna.samplers.BaseSampler":
    """The sampler of one trial: its draws depend on the trial's number."""
    from optuna import samplers  # noqa: PLC0415 -- an extra

    of_search = int(study.user_attrs.get(_SEED, spec.seed))
    (seed,) = map(int, np.random.SeedSequence([of_search, number]).generate_state(1))
    if spec.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    if spec.sampler == "cma_es":
        from deploy.tuning.cma_es import CmaEs  # noqa: PLC0415 -- needs the extra

        return CmaEs(seed)
    if spec.sampler == "evolutionary":
        return samplers.NSGAIISampler(seed=seed, population_size=min(20, spec.trials))
    return samplers.TPESampler(seed=seed, constant_liar=workers > 1)


def _pruner(spec: TuneSpec) -> "optuna.pruners.BasePruner":
    from optuna import pruners  # noqa: PLC0415 -- an extra

    if not spec.pruner.min_rounds:
        return pruners.NopPruner()
    return pruners.SuccessiveHalvingPruner(
        min_resource=spec.pruner.min_rounds, reduction_factor=spec.pruner.factor
    )


def _values(
    trial: "optuna.Trial", space: Mapping[str, RangeSpec]
) -> Mapping[str, Choice]:
    return {name: _suggested(trial, name, values) for name, values in space.items()}


def _suggested(trial: "optuna.Trial", name: str, values: RangeSpec) -> Choice:
    low, high = values.low, values.high
    if values.choices:
        found: Choice = trial.suggest_categorical(name, list(values.choices))
        return found
    if values.is_whole:
        step = int(values.step or 1)
        return trial.suggest_int(name, low, high, step=step, log=values.log)
    return trial.suggest_float(name, low, high, step=values.step, log=values.log)


def _finished(study: "optuna.Study") -> "Sequence[optuna.trial.FrozenTrial]":
    return [trial for trial in study.trials if trial.state.is_finished()]


def _importance(study: "optuna.Study") -> Mapping[str, float]:
    """How much each key decides the result; empty where too few trials say."""
    from optuna import importance  # noqa: PLC0415 -- an extra

    done = [t for t in study.trials if t.state.name == "COMPLETE"]
    if len(done) < _LEAST_RANKED or len(done[0].params) < 2:  # noqa: PLR2004
        return {}
    evaluator = importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    found = importance.get_param_importances(study, evaluator=evaluator)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _trial(trial: "optuna.trial.FrozenTrial", folder: Path) -> TrialRow:
    values = trial.intermediate_values
    return TrialRow(
        number=trial.number,
        state=_STATES[trial.state.name],
        values=trial.params,
        value=trial.value if trial.state.name == "COMPLETE" else None,
        last=values[max(values)] if values else None,
        rounds=max(values, default=0),
        reason=str(trial.user_attrs.get(REASON, "")),
        folder=folder_of(folder, trial.number),
    )


_STATES = {
    "COMPLETE": "completed",
    "PRUNED": "ended early",
    "FAIL": "failed",
    "RUNNING": UNFINISHED,
    "WAITING": UNFINISHED,
}


def _line(trial: TrialRow, spec: TuneSpec, wanted: int) -> str:
    values = "  ".join(f"{name}={_text(v)}" for name, v in trial.values.items())
    result = (
        f"{spec.metric} {trial.value:.4f}" if trial.value is not None else trial.state
    )
    if trial.state == "ended early":
        result = (
            f"ended early after round {trial.rounds}, {spec.metric} {trial.last:.4f}"
        )
    if trial.reason:
        result = f"failed: {trial.reason}"
    return f"trial {trial.number + 1:>3}/{wanted}  {result}  {values}"


def _text(value: Choice) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
