"""The command line: ``crossfed VERB``.

Standard output is data, standard error is progress and log. Exit codes: 0 done,
1 failed, 2 the job or the command line is wrong, 130 stopped on request (Ctrl-C)
after a checkpoint. Heavy imports wait until a verb needs them.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from federation import job_file
from federation.errors import FederationError, JobError
from federation.events import Emit
from federation.job import JobSpec

if TYPE_CHECKING:
    from deploy.simulation import RunResult

DONE, FAILED, BAD_JOB, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    # A user's own models and data are found from where the command is run.
    sys.path.append(os.getcwd())  # noqa: PTH109 -- sys.path holds texts
    try:
        return int(options.verb(options))
    except JobError as error:
        return _complain(error, options, BAD_JOB)
    except KeyboardInterrupt:
        print("crossfed: interrupted", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        # The reader of our output has gone, for example `crossfed runs | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001 -- the last place that can explain it
        return _complain(error, options, FAILED)


def _complain(error: Exception, options: argparse.Namespace, code: int) -> int:
    if options.verbose:
        traceback.print_exception(error)
    known = isinstance(error, FederationError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    print(f"crossfed: {text}", file=sys.stderr)
    if not known and not options.verbose:
        print(
            "crossfed: this is not an error that crossfed expects; add -v for the "
            "traceback",
            file=sys.stderr,
        )
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crossfed",
        description="Train one model across clouds without moving data.",
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
        help="run a job with every site on this machine",
    )
    simulate.add_argument("--out", type=Path, metavar="DIR", help="folder of the run")
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
    simulate.set_defaults(verb=_simulate)

    check = verbs.add_parser(
        "check-job", parents=[job, common], help="check a job and show who gets what"
    )
    check.set_defaults(verb=_check_job)

    report = verbs.add_parser(
        "report", parents=[common], help="write a run's report.html again"
    )
    report.add_argument("run", metavar="RUN", help="folder, run id or job name")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it (in the run)"
    )
    report.set_defaults(verb=_report)

    runs = verbs.add_parser("runs", parents=[common], help="list the runs")
    runs.set_defaults(verb=_runs)
    for verb in (report, runs):
        verb.add_argument(
            "--root", type=Path, default=Path("runs"), help="folder of all runs"
        )
    return parser


def _load(options: argparse.Namespace) -> JobSpec:
    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    return job_file.load(options.job, overrides)


def _simulate(options: argparse.Namespace) -> int:
    from deploy.simulation import simulate  # noqa: PLC0415 -- imports torch

    job = _load(options)
    folder = _folder(job, options.out, resume=options.resume)
    try:
        with _stop_on_signal() as stop, _progress() as progress:
            outcome = simulate(
                job,
                folder=folder,
                resume=options.resume,
                engine=options.engine,
                listeners=[progress],
                stop_requested=stop,
            )
    except KeyboardInterrupt:
        _say_how_to_resume(options, folder)
        return STOPPED
    if options.json:
        print(json.dumps(outcome.summary(), indent=2))
    else:
        _print_outcome(outcome)
    if outcome.status == "completed":
        return DONE
    _say_how_to_resume(options, folder)
    return STOPPED


def _folder(job: JobSpec, out: Path | None, *, resume: bool) -> Path | None:
    """Choose the folder of a run."""
    from deploy import run_folder  # noqa: PLC0415 -- keeps `--help` fast
    from federation.clock import SystemClock  # noqa: PLC0415
    from federation.ids import new_run_id  # noqa: PLC0415

    if out is not None:
        return out
    root = run_folder.runs_root(job)
    if root is None:
        return None
    if resume:
        return run_folder.find_run(job.name, root).path
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
        print(
            "\ncrossfed: stopping after this round; Ctrl-C again to stop at once",
            file=sys.stderr,
        )

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Emit]:
    """Choose how a run shows itself: a picture on a terminal, lines in a pipe."""
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast

    from monitoring.progress import LiveProgress, PlainProgress  # noqa: PLC0415

    console = Console(stderr=True)
    if console.is_terminal:
        with LiveProgress(console) as live:
            yield live
    else:
        with PlainProgress(sys.stderr) as plain:
            yield plain


def _print_outcome(outcome: "RunResult") -> None:
    print(f"status    {outcome.status}")
    print(f"rounds    {outcome.rounds_completed}")
    if outcome.loss is not None and outcome.accuracy is not None:
        print(f"loss      {outcome.loss:.4f} nats, on held-out data of all sites")
        print(f"accuracy  {outcome.accuracy:.2%}")
    if outcome.folder is not None:
        print(f"run       {outcome.folder}")
        print(f"report    {outcome.folder / 'report.html'}")


def _say_how_to_resume(options: argparse.Namespace, folder: Path | None) -> None:
    if folder is None:
        print("crossfed: stopped; this run was kept nowhere", file=sys.stderr)
        return
    settings = "".join(f" --set {text!r}" for text in options.set)
    seed = "" if options.seed is None else f" --seed {options.seed}"
    print(
        "crossfed: stopped; go on with\n"
        f"  crossfed simulate {options.job}{settings}{seed} --out {folder} --resume",
        file=sys.stderr,
    )


def _check_job(options: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast

    from deploy import wiring  # noqa: PLC0415
    from federation.clock import SystemClock  # noqa: PLC0415
    from monitoring.data_table import data_table  # noqa: PLC0415

    job = _load(options)
    federation = wiring.build_federation(job)
    dealt = wiring.data_distributed(federation, at=SystemClock().now())
    if options.json:
        print(json.dumps(job_file.document(job), indent=2))
        return DONE
    layout = federation.pool.layout
    Console(highlight=False).print(data_table(dealt))
    print(
        f"{job.name}: {job.rounds} rounds, {len(job.sites)} sites, "
        f"{layout.size:,} values ({4 * layout.size:,} bytes) each way, site and round"
    )
    print("the job is sound")
    return DONE


def _report(options: argparse.Namespace) -> int:
    from deploy.run_folder import find_run  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.simulation import leave_report  # noqa: PLC0415

    run = find_run(options.run, options.root)
    path = leave_report(run, options.out)
    print(json.dumps({"report": str(path)}) if options.json else path)
    return DONE


def _runs(options: argparse.Namespace) -> int:
    from deploy.run_folder import find_runs, summary  # noqa: PLC0415

    rows = [summary(run) for run in find_runs(options.root)]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_runs(rows)
    return DONE


def _print_runs(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name in ("run", "job", "status", "rounds", "loss", "accuracy", "folder"):
        table.add_column(name, overflow="fold")
    for row in rows:
        loss, accuracy = row.get("loss"), row.get("accuracy")
        table.add_row(
            row.get("run_id", ""),
            row.get("job", ""),
            row["status"],
            f"{row.get('rounds_completed', 0)}/{row.get('rounds', '?')}",
            "" if loss is None else f"{loss:.4f}",
            "" if accuracy is None else f"{accuracy:.1%}",
            row["folder"],
        )
    Console(highlight=False).print(table)
