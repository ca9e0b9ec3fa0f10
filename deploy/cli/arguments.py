"""Arguments of the command line that several verbs take."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from federation.job.spec import JobSpec

# What `add_subparsers` of argparse returns, whose type is not public.
Verbs = Any


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations of options, nor do its verbs: they are of its class."""

    def __init__(self, **settings: Any) -> None:
        """See argparse."""
        super().__init__(allow_abbrev=False, **settings)


def common_arguments() -> argparse.ArgumentParser:
    """Arguments of every verb."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show tracebacks of errors"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout"
    )
    return parser


def job_arguments() -> argparse.ArgumentParser:
    """Arguments that name a job."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("job", type=Path, metavar="JOB", help="a job file (TOML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a key of the job, for example training.optimizer.lr=0.1",
    )
    parser.add_argument("--seed", type=int, help="replace the job's seed")
    return parser


def add_root(parser: argparse.ArgumentParser) -> None:
    """Let a person say where runs are looked for."""
    parser.add_argument(
        "--root", type=Path, default=Path("runs"), help="folder of all runs"
    )


def named_path(text: str) -> Path:
    """A path that is named: an unset variable of a shell names the folder we are in."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return Path(text)


def load_job(options: argparse.Namespace) -> "JobSpec":
    """Read the job that the arguments of ``job_arguments`` name.

    Raises:
        JobError: It cannot be read, or is not one that can be run.
    """
    from federation.job import job_file  # noqa: PLC0415 -- keeps `--help` fast

    overrides = list(options.set)
    if options.seed is not None:
        overrides.append(f"seed={options.seed}")
    return job_file.load(options.job, overrides)
