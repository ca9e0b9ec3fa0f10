"""Load a job, run it here and compare results: ``import crossfed``."""

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.user_code import sentence, unable_to_exit
from federation.clock import SystemClock
from federation.errors import JobError
from federation.events import Event, ModelEvaluated, RoundFinished, RunFinished
from federation.job import code_files, job_file
from federation.job.spec import JobSpec

if TYPE_CHECKING:
    from federation.events import Emit
    from monitoring.runs.run_folder import RunFolder
    from monitoring.runs.run_result import RunResult

Source = JobSpec | Mapping[str, Any] | str | Path

_LOG = logging.getLogger("crossfed")


def load_job(
    source: Source, overrides: Mapping[str, Any] | None = None, /, **keys: Any
) -> JobSpec:
    """Load and check a job.

    Args:
        source: Path of a job file; TOML text, which has a line break; nested mappings,
            where a function or class may stand for its name, such as that of a model;
            or another job. Files that it names, such as ``./my_model.py:net``, are
            relative to the job file, or to the working folder.
        overrides: Values that replace others, by dotted key, for example
            ``{"training.optimizer.lr": 0.1, "sites.0.name": "a"}``. None removes a key.
        keys: The same for keys at the top, for example ``rounds=3``.

    Raises:
        JobError: The job cannot be read, or asks for something unknown or out of range.
        StoreError: ``model.weights`` is in a bucket that cannot be read.
    """
    document, folder = read(source)
    for key, value in {**(overrides or {}), **keys}.items():
        job_file.override(document, key, value)
    document = _named(document, "")
    code_files.pin(document, folder)
    job = job_file.parse(document)
    if job.training.standardise:
        from deploy.wiring.statistics_moments import with_moments  # noqa: PLC0415

        job = with_moments(job)
    if job.model.weights is None:
        return job
    from clients.models.starting_weights import pinned  # noqa: PLC0415 -- imports torch

    return pinned(job, folder)


def _named(value: Any, key: str) -> Any:
    """Replace functions and classes in a job's document by their names.

    Raises:
        JobError: A process that runs the job could not find one of them by its name.
    """
    if isinstance(value, Mapping):
        return {n: _named(each, f"{key}.{n}".lstrip(".")) for n, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each, f"{key}[{at}]") for at, each in enumerate(value)]
    if not callable(value):
        return value
    module = str(getattr(value, "__module__", ""))
    name = str(getattr(value, "__qualname__", ""))
    if getattr(sys.modules.get(module), name, None) is not value:
        raise JobError(
            f"{value!r:.80} is not at the top of a module, where a run finds it by its "
            "name: define a function or class there, and give its arguments in options",
            key=key,
        )
    return f"{module}:{name}"


def read(source: Source) -> tuple[dict[str, Any], Path]:
    """Read a job without checking it.

    Returns:
        Nested mappings, which are the caller's to change, and the folder of its files.
    """
    match source:
        case JobSpec():
            return job_file.document(source), Path()
        case Mapping():
            return copy.deepcopy(dict(source)), Path()
        case str() if "\n" in source:
            return job_file.parse_toml(source), Path()
        case _:
            return job_file.read_toml(Path(source)), Path(source).parent


def simulate(
    job: Source,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    extend: int | None = None,
    engine: str = "inproc",
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_event: Callable[[Event], object] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    progress: bool | None = None,
    report: bool = True,
    **keys: Any,
) -> "RunResult":
    """Run a job with every site on this machine.

    An exception in ``on_round`` or ``on_event`` is logged with its line, and the run
    continues.

    Args:
        job: What ``load_job`` takes.
        overrides: As in ``load_job``.
        folder: Where to keep the run; without it nothing is written.
        resume: Continue the run in ``folder`` from its newest checkpoint.
        extend: Continue it, finished or not, up to this higher number of rounds.
        engine: ``inproc``, ``flower`` (Flower's simulation) or ``virtual`` (virtual
            time).
        on_round: Called with a row of ``RunResult.history`` once the round's model is
            evaluated, which happens during the next round.
        on_event: Called with every event of ``federation.events``.
        stop_requested: Called after every round; true ends the run after its
            checkpoint.
        progress: Whether to show progress on standard error; by default only on a
            terminal.
        report: Whether to write ``report.html`` in the folder, which takes up to a
            second.
        keys: As in ``load_job``.

    Raises:
        JobError: The job asks for something that cannot be done.
        SiteError: The sites cannot use the data.
        RunNotFound: ``resume`` is set, and ``folder`` holds no run.
        RunConflict: ``folder`` holds a run and ``resume`` is not set.
        FederationError: Anything else that ends a run early.
    """
    from deploy.wiring import simulation  # noqa: PLC0415 -- imports torch

    clock = SystemClock()
    if extend is not None:
        keys["rounds"] = extend
    listeners: list[Emit] = []
    if on_event is not None:
        listeners.append(_guarded("on_event", on_event))
    if on_round is not None:
        listeners.append(_each_round(_guarded("on_round", on_round)))
    spec = load_job(job, overrides, **keys)
    with _progress(clock, spec, shown=progress) as shown, unable_to_exit():
        return simulation.simulate(
            spec,
            folder=None if folder is None else Path(folder),
            resume=resume,
            extend=extend is not None,
            engine=engine,
            listeners=[*shown, *listeners],
            stop_requested=stop_requested,
            clock=clock,
            report=report,
        )


def report(run: "RunResult | str | Path", path: str | Path | None = None) -> Path:
    """Write the report of a run, one HTML page, and return its path.

    Args:
        run: A result, a run's folder, a run ID, or a job's name for its newest run.
        path: Where to write; ``report.html`` in the run's folder by default.

    Raises:
        RunNotFound: There is no such run, or it was not stored.
    """
    from monitoring.runs.run_folder import leave_report  # noqa: PLC0415 -- imports torch

    return leave_report(_kept(run), None if path is None else Path(path))


def compare(*runs: "RunResult | str | Path", path: str | Path | None = None) -> Path:
    """Write one HTML page that compares runs, and return its path.

    Args:
        runs: Two or more, named as in ``report``.
        path: Where to write; ``comparison.html`` in the working folder by default.

    Raises:
        RunNotFound: There is no such run, or it was not stored.
    """
    from monitoring.runs.run_folder import leave_comparison  # noqa: PLC0415 -- slow to import

    if len(runs) < 2:  # noqa: PLR2004
        raise ValueError(f"compare takes two runs or more, not {len(runs)}")
    return leave_comparison(
        [_kept(run) for run in runs], None if path is None else Path(path)
    )


def _kept(run: "RunResult | str | Path") -> "RunFolder":
    from federation.errors import RunNotFound  # noqa: PLC0415
    from monitoring.runs.find import LOCAL_ROOT, find_run  # noqa: PLC0415

    place = run if isinstance(run, str | Path) else run.folder
    if place is None:
        raise RunNotFound(
            "this run was not stored: give simulate a folder, for example "
            "folder='runs/mine'"
        )
    return find_run(str(place), LOCAL_ROOT)


@contextmanager
def _progress(
    clock: SystemClock, job: JobSpec, *, shown: bool | None
) -> "Iterator[Sequence[Emit]]":
    if not (sys.stderr.isatty() if shown is None else shown):
        yield ()
        return
    from deploy.cli.run_progress import run_progress  # noqa: PLC0415 -- imports rich

    with run_progress(clock, every=job.evaluation.every) as show:
        yield (show,)


def _guarded(name: str, call: Callable[[Any], object]) -> Callable[[Any], None]:
    """Log a callback's exception instead of ending the run."""

    def listen(given: Any) -> None:
        try:
            call(given)
        except Exception as error:  # noqa: BLE001 -- foreign code may raise anything
            _LOG.warning("%s raised %s; the run continues", name, sentence(error))

    return listen


def _each_round(call: Callable[[dict[str, Any]], None]) -> "Emit":
    """Call with each round's row when the round is complete."""
    from monitoring.views.result_json import history  # noqa: PLC0415
    from monitoring.views.run_fold import RunFold  # noqa: PLC0415

    fold, called = RunFold(), 0

    def listen(event: Event) -> None:
        nonlocal called
        fold.add(event)
        if not isinstance(event, RoundFinished | ModelEvaluated | RunFinished):
            return
        view = fold.view()
        is_over = isinstance(event, RunFinished)
        last = view.rounds[-1].index if view.rounds else 0
        for row, values in zip(view.rounds, history(view), strict=True):
            if row.index > called and (row.evaluated or row.index < last or is_over):
                called = row.index
                call(values)

    return listen
