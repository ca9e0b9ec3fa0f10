"""The command line: ``crossfed VERB``.

Standard output is data, standard error is progress and log. Heavy imports
wait until a verb needs them.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import (
    audit_verb,
    data_verb,
    enrolment_verbs,
    exit_codes,
    model_verbs,
    run_verbs,
    service_verbs,
    storage_verb,
    tool_verbs,
)
from deploy.exit_codes import DONE, FAILED, OUT_OF_BUDGET, STOPPED
from deploy.terminal import tell
from federation.errors import (
    FederationError,
    JobError,
    SiteError,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from deploy.run_result import RunResult
    from federation.events import DataDistributed, Emit, Event
    from federation.job import JobSpec

# Width of tables that nobody looks at on a terminal.
_PIPE_COLUMNS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        # A user's own models and data are found from where the command is run.
        sys.path.append(os.getcwd())  # noqa: PTH109 -- sys.path holds texts
        code = int(options.verb(options))
        # Here and not at the interpreter's end, where no error can be handled.
        sys.stdout.flush()
    except KeyboardInterrupt:
        tell("interrupted")
        return STOPPED
    except BrokenPipeError:
        # The reader of our output has gone, for example `crossfed runs | head`.
        _forget_output()
        return FAILED
    except Exception as error:  # noqa: BLE001 -- the last place that can explain it
        return _complain(error, options)
    return code


def _forget_output() -> None:
    """Let what is still buffered go nowhere when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _complain(error: Exception, options: argparse.Namespace) -> int:
    if options.verbose:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if not isinstance(error, FederationError):
        tell(f"{type(error).__name__}: {error}")
        if not options.verbose:
            tell("this is not an error that crossfed expects; add -v for the traceback")
        return FAILED
    text = str(error)
    job = getattr(options, "job", None)
    if isinstance(error, (JobError, SiteError)) and job and str(job) not in text:
        text = f"{job}: {text}"
    tell(text)
    return exit_codes.of_error(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crossfed",
        description="Train one model across clouds without moving data.",
        allow_abbrev=False,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "-v", "--verbose", action="store_true", help="show tracebacks of errors"
    )
    common.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout"
    )
    job = argparse.ArgumentParser(add_help=False)
    job.add_argument("job", type=Path, metavar="JOB", help="a job file (TOML)")
    job.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a key of the job, for example training.optimizer.lr=0.1",
    )
    job.add_argument("--seed", type=int, help="replace the job's seed")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    simulate = verbs.add_parser(
        "simulate",
        parents=[job, common],
        allow_abbrev=False,
        help="run a job with every site on this machine",
    )
    simulate.add_argument("--out", type=_path, metavar="DIR", help="folder of the run")
    simulate.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out, or with the job's newest run",
    )
    simulate.add_argument(
        "--engine",
        choices=("inproc", "flower"),
        default="inproc",
        help="call the sites in this process (default), or on Flower's engine",
    )
    simulate.add_argument(
        "--transcript",
        type=Path,
        metavar="DIR",
        help="write every message as the aggregator saw it into a new folder",
    )
    simulate.set_defaults(verb=_simulate)

    check = verbs.add_parser(
        "check-job",
        parents=[job, common],
        allow_abbrev=False,
        help="check a job and show who gets what",
    )
    check.set_defaults(verb=_check_job)

    report = verbs.add_parser(
        "report",
        parents=[common],
        allow_abbrev=False,
        help="write a run's report.html again, or hold runs against each other",
    )
    report.add_argument(
        "run",
        nargs="+",
        metavar="RUN",
        help="folder, run id or job name; several are held against each other",
    )
    report.add_argument(
        "--out",
        type=_path,
        metavar="FILE",
        help="where to write it (in the run; comparison.html for several runs)",
    )
    report.set_defaults(verb=_report)

    runs = verbs.add_parser(
        "runs", parents=[common], allow_abbrev=False, help="list the runs"
    )
    runs.set_defaults(verb=_runs)
    for verb in (report, runs):
        verb.add_argument(
            "--root", type=Path, default=Path("runs"), help="folder of all runs"
        )
    audit_verb.add_verb(verbs, [job, common], load=_load, guard=_unable_to_exit)
    data_verb.add_verb(verbs, common)
    service_verbs.add_verbs(verbs, common)
    enrolment_verbs.add_verbs(verbs, common)
    run_verbs.add_verbs(verbs, job, common, load=_load, progress=_shown)
    tool_verbs.add_verbs(verbs, common)
    model_verbs.add_verbs(verbs, common)
    storage_verb.add_verb(verbs, common)
    return parser


def _path(text: str) -> Path:
    """A path that is named: an unset variable of a shell names the folder we are in."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return Path(text)


def _load(options: argparse.Namespace) -> "JobSpec":
    from federation import job_file  # noqa: PLC0415 -- keeps `--help` fast

    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    return job_file.load(options.job, overrides)


def _simulate(options: argparse.Namespace) -> int:
    job = _load(options)
    folder = _folder(job, options.out, resume=options.resume)
    from deploy.simulation import simulate  # noqa: PLC0415 -- imports torch

    try:
        with _stop_on_signal() as stop, _progress() as progress, _unable_to_exit():
            outcome = simulate(
                job,
                folder=folder,
                resume=options.resume,
                engine=options.engine,
                transcript=options.transcript,
                listeners=[_while_read(progress)],
                stop_requested=stop,
            )
    except KeyboardInterrupt:
        _say_how_to_resume(options, folder, "stopped at once")
        return STOPPED
    except StoreUnavailable as error:
        code = _complain(error, options)
        if folder is not None and _has_begun(folder):
            _say_how_to_resume(options, folder, "once that is mended")
        return code
    if options.resume and outcome.status == "completed" and not outcome.rounds_now:
        tell(f"run {outcome.run_id} is completed: no round was left to run")
    if options.json:
        kept = None if outcome.folder is None else str(outcome.folder)
        _print_json({**outcome.summary(), "folder": kept})
    else:
        _print_outcome(outcome)
    if outcome.status == "completed":
        return DONE
    sys.stdout.flush()
    if outcome.status == "exhausted":
        tell("the privacy budget is spent: this model is the last that it allows")
        return OUT_OF_BUDGET
    _say_how_to_resume(options, folder, "stopped")
    return STOPPED


def _folder(job: "JobSpec", out: Path | None, *, resume: bool) -> Path | None:
    """Choose the folder of a run."""
    from deploy import run_folder, run_store  # noqa: PLC0415 -- keeps `--help` fast
    from federation.clock import SystemClock  # noqa: PLC0415
    from federation.ids import new_run_id  # noqa: PLC0415

    root = run_folder.runs_root(job)
    if out is not None:
        return out
    if root is None:
        return None
    if resume:
        return run_store.newest_folder(job, root)
    return root / job.name / new_run_id(SystemClock().now(), os.urandom(3))


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a wish to stop, and the second into the end."""
    asked = False

    def ask(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # Not print: it may have been interrupted half-way, and cannot be re-entered.
        text = b"\ncrossfed: stopping after this round; Ctrl-C again to stop at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _unable_to_exit() -> Iterator[None]:
    """Refuse a module of the user's that ends the program.

    With code 0 it would pass for a run that is done.

    Raises:
        JobError: It did.
    """
    try:
        yield
    except SystemExit as error:
        raise JobError(
            f"code that the job names ended the program: {error!r}"
        ) from error


@contextmanager
def _progress() -> Iterator["Emit"]:
    """Choose how a run shows itself: a picture on a terminal, lines in a pipe."""
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast

    from monitoring.live import LiveProgress  # noqa: PLC0415
    from monitoring.progress import PlainProgress  # noqa: PLC0415

    console = Console(stderr=True)
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        with LiveProgress(console) as live:
            yield live
    else:
        plain = PlainProgress(sys.stderr)
        yield plain
        with contextlib.suppress(OSError):
            plain.close()


@contextmanager
def _shown() -> Iterator["Emit"]:
    """Progress that outlives its reader."""
    with _progress() as progress:
        yield _while_read(progress)


def _while_read(progress: "Emit") -> "Emit":
    """Go on without progress when its reader is gone: the run is worth more."""
    is_read = True

    def listen(event: "Event") -> None:
        nonlocal is_read
        if is_read:
            try:
                progress(event)
            except OSError:
                is_read = False

    return listen


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _print_outcome(outcome: "RunResult") -> None:
    from monitoring.outcome import lines  # noqa: PLC0415 -- keeps `--help` fast

    for line in lines(outcome.view):
        print(line)
    if outcome.folder is not None:
        print(f"run         {outcome.folder}")
        print(f"report      {outcome.folder / 'report.html'}")


def _has_begun(folder: Path) -> bool:
    """Whether there is anything to resume in a folder."""
    from deploy.run_folder import RunFolder  # noqa: PLC0415

    try:
        return RunFolder(folder).run_id() is not None
    except FederationError:
        return False


def _say_how_to_resume(
    options: argparse.Namespace, folder: Path | None, why: str
) -> None:
    if folder is None:
        tell(f"{why}; this run was kept nowhere")
        return
    if not _has_begun(folder):
        tell(f"{why}, before the run began; there is nothing to resume")
        return
    words = ["crossfed", "simulate", str(options.job)]
    for text in options.set:
        words += ["--set", text]
    if options.seed is not None:
        words += ["--seed", str(options.seed)]
    if options.engine != "inproc":
        words += ["--engine", options.engine]
    words += ["--out", str(folder), "--resume"]
    tell(f"{why}; go on with\n  {shlex.join(words)}")


def _check_job(options: argparse.Namespace) -> int:
    job = _load(options)
    from deploy import job_check, run_folder, wiring  # noqa: PLC0415 -- imports torch
    from federation import job_file  # noqa: PLC0415
    from federation.clock import SystemClock  # noqa: PLC0415
    from monitoring.data_table import data_table  # noqa: PLC0415

    run_folder.runs_root(job)
    with _unable_to_exit():
        federation = wiring.build_federation(job)
        promises = job_check.promises(federation)
    dealt = wiring.data_distributed(federation, at=SystemClock().now())
    size = federation.pool.layout.size
    if options.json:
        sites = _site_rows(dealt)
        document: dict[str, Any] = {"job": job_file.document(job)}
        document |= {"sites": sites, "parameters": size, "privacy": promises}
        _print_json(document)
        return DONE
    console = _console()
    console.print(data_table(dealt, columns=console.width))
    print(
        f"{job.name}: {job.rounds} rounds, {len(job.sites)} sites, {size:,} values: "
        f"{job_check.bytes_down(size):,} bytes down and "
        f"{job_check.bytes_up(job, size):,} up for each site and round"
    )
    for line in promises:
        print(line)
    print("the job is sound")
    return DONE


def _site_rows(dealt: "DataDistributed") -> list[dict[str, Any]]:
    return [
        {
            "site": share.site,
            "cloud": share.cloud,
            "region": share.region,
            "train_examples": share.train_examples,
            "held_out_examples": share.held_out_examples,
            "label_kind": dealt.label_kind,
            "counts": dict(zip(dealt.labels, share.counts, strict=False)),
        }
        for share in dealt.shares
    ]


def _report(options: argparse.Namespace) -> int:
    from deploy.comparison import leave_comparison  # noqa: PLC0415
    from deploy.run_folder import find_run, leave_report  # noqa: PLC0415

    runs = [find_run(name, options.root) for name in options.run]
    # The same run by two names is one run.
    runs = list({run.path.resolve(): run for run in runs}.values())
    if len(runs) == 1:
        path = leave_report(runs[0], options.out)
    else:
        path = leave_comparison(runs, options.out)
    if options.json:
        _print_json({"report": str(path)})
    else:
        print(path)
    return DONE


def _runs(options: argparse.Namespace) -> int:
    from deploy.run_folder import find_runs, summary  # noqa: PLC0415

    rows = [summary(run) for run in find_runs(options.root)]
    # By time, however the folders are called.
    rows.sort(key=lambda row: str(row["run_id"]))
    if options.json:
        _print_json(rows)
    elif rows:
        _print_runs(rows)
    else:
        tell(f"there are no runs in {options.root}")
    return DONE


def _print_runs(rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table  # noqa: PLC0415 -- keeps `--help` fast
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name in ("run", "job", "status", "rounds", "loss", "accuracy", "folder"):
        table.add_column(name, overflow="fold")
    for row in rows:
        loss, accuracy = row.get("loss"), row.get("accuracy")
        cells = (
            row["run_id"],
            row["job"],
            row["status"],
            f"{row.get('rounds_completed', '?')}/{row.get('rounds', '?')}",
            "" if loss is None else f"{loss:.4f}",
            "" if accuracy is None else f"{accuracy:.1%}",
            row["folder"],
        )
        # As text: a folder's name may look like markup.
        table.add_row(*(Text(cell) for cell in cells))
    _console().print(table)


def _console() -> Any:
    """Standard output for tables: wide in a pipe, so that no line is broken."""
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(highlight=False, width=width)
