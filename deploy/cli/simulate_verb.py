"""The verbs ``simulate`` and ``evaluate`` of the command line.

Arguments in, progress and what came of it out; the work is in
``deploy.wiring.simulation``.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.user_code import unable_to_exit
from deploy.cli.arguments import load_job
from deploy.cli.run_progress import run_progress
from deploy.cli.terminal import (
    complain,
    interrupts,
    say,
    say_json,
    say_table,
    show_failure,
    tell,
)
from deploy.cli.web import live_page, stop_once
from deploy.exit_codes import DONE, OUT_OF_BUDGET, STOPPED
from federation.errors import (
    FederationError,
    JobError,
    RunNotFound,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from federation.job.spec import JobSpec
    from monitoring.runs.run_result import RunResult
    from monitoring.views.statistics_view import ColumnStatistics, RunStatistics
    from monitoring.web.app import Shown


_MOST_SHOWN, _COMPACT = 16, "see statistics.json and report.html"


def _simulate(options: argparse.Namespace) -> int:
    return _run(options, load_job(options))


def _stats(options: argparse.Namespace) -> int:
    """Run a job of statistics, or show what a run of one has found.

    Raises:
        JobError: The job asks for no statistics.
        RunNotFound: There is no such job and no such run, or it has found nothing.
    """
    if options.job.is_file():
        job = load_job(options)
        if job.statistics is None:
            raise JobError(
                "is missing: say there which columns and statistics you want",
                key="statistics",
            )
        return _run(options, job)
    from monitoring.runs.find import find_run  # noqa: PLC0415 -- keeps `--help` fast

    run = find_run(str(options.job), options.root)
    found = run.read_statistics()
    if found is None:
        raise RunNotFound(f"the run in {run.path} has no statistics.json")
    if options.json:
        say_json(found.document())
    else:
        print_statistics(found)
    return DONE


def print_statistics(found: "RunStatistics") -> None:
    """Print what a run of statistics has found."""
    records = {"n": found.records, "n_noise": found.noise.get("counts")}
    say(f"records     {_cell(records, 'n')} of {found.sites} sites")
    shown = ("name", "count", "missing", "mean", "deviation", "below", "above")
    quantiles = [f"q{q}" for column in found.columns for q in column.quantiles]
    names = [*shown, *dict.fromkeys(quantiles)]
    say_table(names, [[_cell(row, n) for n in names] for row in found.rows])
    for column in found.columns:
        _print_cells(column)
    if len(found.numbers) > _MOST_SHOWN:
        say(f"correlations: {_COMPACT}")
    elif found.numbers:
        whole = {"n": found.complete, "n_noise": found.noise.get("counts")}
        say(f"correlations over {_cell(whole, 'n')} records without a gap")
        noises = found.correlation_noise or [[None] * len(found.numbers)] * len(
            found.numbers
        )
        cells = [
            [name, *map(_ratio, row, noise)]
            for name, row, noise in zip(
                found.numbers, found.correlations, noises, strict=True
            )
        ]
        say_table(["", *found.numbers], cells)
    if found.drift:
        say("drift       of the site that is farthest from all others together")
        names = ["column", "site", "difference", "distance"]
        rows = found.document()["drift"][:_MOST_SHOWN]
        say_table(names, [[_cell(row, n) for n in names] for row in rows])
    _print_limits(found, has_quantiles=bool(quantiles))
    if found.epsilon is not None:
        say(f"epsilon     {found.epsilon:.3g} at delta {found.delta:.1g}")


def _print_limits(found: "RunStatistics", *, has_quantiles: bool) -> None:
    """Print what figures leave out, and how far noise may move them."""
    if found.noise:
        say("±           standard deviation of the noise; - is not known")
    if found.left_out:
        say(f"left out    {found.left_out}")
    if has_quantiles and found.noise:
        say("( to )      holds the quantile with 95 %, for the noise")
    elif has_quantiles and found.rank_error:
        say("( to )      holds the quantile: sites count few records together")


def _print_cells(column: "ColumnStatistics") -> None:
    """Print the categories of a column, or its histogram on one line."""
    noise = {f"{kind}_noise": size for kind, size in column.noise.items()}
    for name, size in column.sizes.items():
        cell = _cell({"categories": size, **noise}, "categories")
        say(f"{column.name} = {name}: {cell}")
    if column.histogram:
        sizes = [
            _cell({"histogram": n, **noise}, "histogram") for n in column.histogram
        ]
        few = len(sizes) <= _MOST_SHOWN
        bins = f"{len(sizes)} bins from {column.edges[0]:g} to {column.edges[-1]:g}"
        say(f"{column.name}: {bins}: {', '.join(sizes) if few else _COMPACT}")


def _ratio(ratio: float | None, noise: float | None) -> str:
    """A correlation."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if not noise else f"{ratio:.2f} ±{noise:.2g}"


def _cell(row: dict[str, Any], name: str) -> str:
    """A figure, and the standard deviation of its noise if it has any."""
    value, noise = row.get(name), row.get(f"{name}_noise")
    if value is None:
        return "-"
    after = "" if noise is None else f" ±{noise:.3g}"
    if (low := row.get(f"{name}_low")) is not None:
        after = f" ({low:.4g} to {row[f'{name}_high']:.4g})"
    if isinstance(value, float):
        return f"{value:.6g}{after}"
    return f"{value:,}{after}" if type(value) is int else str(value)


def _run(options: argparse.Namespace, job: "JobSpec") -> int:
    folder = _folder(job, options)
    from deploy.wiring.simulation import simulate  # noqa: PLC0415 -- imports torch

    try:
        with (
            stop_on_signal() as stop,
            _page(options, folder),
            run_progress(options.clock, every=job.evaluation.every) as show,
            unable_to_exit(),
        ):
            outcome = simulate(
                job,
                folder=folder,
                resume=options.resume,
                extend=options.extend is not None,
                engine=options.engine,
                transcript=options.transcript,
                listeners=[show],
                stop_requested=stop,
                clock=options.clock,
                show_failure=show_failure(options),
                report=not options.no_report,
            )
    except KeyboardInterrupt:
        _say_how_to_resume(options, folder, "stopped immediately")
        return STOPPED
    except StoreUnavailable as error:
        code = complain(error, options)
        if folder is not None and _has_begun(folder):
            _say_how_to_resume(options, folder, "the run ended", first="fix that and ")
        return code
    resumed = options.resume or options.extend is not None
    if resumed and outcome.status == "completed" and not outcome.rounds_now:
        tell(f"run {outcome.run_id} is already complete")
    if options.json:
        kept = None if outcome.folder is None else str(outcome.folder)
        found = outcome.statistics
        asked = {} if found is None else {"statistics": found.document()}
        say_json({**outcome.summary(), **asked, "folder": kept})
    else:
        _print_outcome(outcome)
    if outcome.status == "completed":
        return DONE
    sys.stdout.flush()
    if outcome.status == "exhausted":
        tell("the privacy budget is spent: it allows no model after this one")
        return OUT_OF_BUDGET
    _say_how_to_resume(options, folder, "stopped")
    return STOPPED


def _page(
    options: argparse.Namespace, folder: Path | None
) -> AbstractContextManager[None]:
    """The live page of the run.

    Raises:
        JobError: The run leaves nothing that a page could show.
    """
    if folder is None and options.web:
        raise JobError(
            "a run that is kept in memory has no live page: give --out",
            key="storage.url",
        )
    from monitoring.runs.run_folder import RunFolder  # noqa: PLC0415

    if folder is None:
        return nullcontext()

    def pages() -> "Shown":
        from deploy.aggregator_host.run_list import shown  # noqa: PLC0415 -- imports much

        stop = stop_once(run, lambda: signal.raise_signal(signal.SIGINT))
        return shown(folder.parent.parent, {"stop": stop}, run)

    run = RunFolder(folder)
    return live_page(options, pages, run=run)


def _folder(job: "JobSpec", options: argparse.Namespace) -> Path | None:
    """Choose the folder of a run."""
    from deploy.wiring import run_store  # noqa: PLC0415 -- keeps `--help` fast
    from federation.ids import new_run_id  # noqa: PLC0415
    from monitoring.runs.find import runs_root  # noqa: PLC0415 -- keeps `--help` fast

    root = runs_root(job)
    out: Path | None = options.out
    if out is not None:
        return out
    if root is None:
        return None
    if options.resume or options.extend is not None:
        unfinished = options.extend is None
        return run_store.newest_folder(job, root, unfinished=unfinished)
    return root / job.name / new_run_id(options.clock.now(), os.urandom(3))


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop; the second ends the process."""
    asked = False

    def ask(_number: int) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # Not print: it may have been interrupted half-way, and cannot be re-entered.
        text = b"\ncrossfed: stopping after this round; Ctrl-C again to stop now\n"
        with contextlib.suppress(OSError):
            os.write(2, text)

    with interrupts(ask):
        yield lambda: asked


def _print_outcome(outcome: "RunResult") -> None:
    from monitoring.terminal.outcome import lines  # noqa: PLC0415 -- keeps `--help` fast

    if outcome.statistics is not None:
        print_statistics(outcome.statistics)
    for line in lines(outcome.view):
        say(line)
    if outcome.folder is not None:
        say(f"run         {outcome.folder}")
        report = outcome.folder / "report.html"
        if report.is_file():
            say(f"report      {report}")


def _has_begun(folder: Path) -> bool:
    """Whether there is anything to resume in a folder."""
    from monitoring.runs.run_folder import RunFolder  # noqa: PLC0415

    try:
        return RunFolder(folder).run_id() is not None
    except FederationError:
        return False


def _say_how_to_resume(
    options: argparse.Namespace, folder: Path | None, why: str, *, first: str = ""
) -> None:
    if folder is None:
        tell(f"{why}; this run was not stored")
        return
    if not _has_begun(folder):
        tell(f"{why} before the run started; there is nothing to resume")
        return
    verb = "stats" if options.verb is _stats else "simulate"
    words = ["crossfed", verb, str(options.job)]
    if model := getattr(options, "model", ""):
        words[1:2] = ["evaluate", model]
    for text in options.set:
        words += ["--set", text]
    if options.seed is not None:
        words += ["--seed", str(options.seed)]
    if options.engine != "inproc":
        words += ["--engine", options.engine]
    if options.no_report:
        words.append("--no-report")
    go_on = ["--resume"] if options.extend is None else ["--extend", options.extend]
    words += ["--out", str(folder), *map(str, go_on)]
    tell(f"{why}; {first}resume with\n  {shlex.join(words)}")


def _evaluate(options: argparse.Namespace) -> int:
    """Run a job without training: its sites evaluate a model."""
    options.extend = options.transcript = None
    return _simulate(options)


VERBS = {
    "evaluate": _evaluate,
    "simulate": _simulate,
    "stats": _stats,
}
