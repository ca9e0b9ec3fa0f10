"""Output of commands: data on standard output, messages on standard error."""

import argparse
import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from clients.user_code import frames_of, last_frames, origin
from deploy import exit_codes
from deploy.exit_codes import FAILED
from deploy.service_log import plain
from federation.errors import FederationError, JobError, QuorumNotMet, SiteError
from federation.typed_json import encode

# Width of tables that do not go to a terminal.
_PIPE_COLUMNS = 200
_DOTS = 3


def say(text: str) -> None:
    """Write a line of data, without what would control a terminal."""
    sys.stdout.write(plain(text) + "\n")


def say_json(value: Any) -> None:
    """Write plain values as JSON; NaN, which JSON lacks, becomes a string."""
    say(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return encode(value)


def tell(text: str) -> None:
    """Write a message for a person, if standard error is still open."""
    with contextlib.suppress(OSError):
        print(f"crossfed: {plain(text)}", file=sys.stderr, flush=True)  # noqa: T201


def note(text: str) -> None:
    """Write a message in one line: what others have sent begins no line."""
    tell(" ".join(text.splitlines()))


def console() -> Any:
    """Standard output for tables: wide in a pipe, so that no line is broken."""
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(highlight=False, width=width)


def say_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, cut: str = ""
) -> bool:
    """Write a table without lines, with a heading.

    Args:
        names: Heads of its columns.
        rows: Texts of its cells.
        cut: The last column, if its cells are cut so that each row is one line.

    Returns:
        Whether a cell was cut.
    """
    from rich.table import Table  # noqa: PLC0415 -- keeps `--help` fast
    from rich.text import Text  # noqa: PLC0415

    table, output, is_cut = Table(box=None, pad_edge=False), console(), False
    cells = [
        [" ".join(map(str.strip, plain(cell).split("\n"))) for cell in row]
        for row in rows
    ]
    if cut:
        columns = [*zip(names, *cells, strict=True)][:-1]
        taken = sum(max(map(len, column)) + 2 for column in columns)
        left = max(output.width - taken, len(cut) + _DOTS)
        for row in cells:
            if len(row[-1]) > left:
                row[-1], is_cut = f"{row[-1][: left - _DOTS].rstrip()}...", True
    for name in names:
        # A run's name is copied from here: it stays in one line.
        table.add_column(name, overflow="fold", no_wrap=name in {"run", cut})
    for row in cells:
        # As text: a folder's name may look like markup.
        table.add_row(*map(Text, row))
    output.print(table)
    return is_cut


@contextmanager
def interrupts(do: Callable[[int], None]) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM until the end of the block.

    Args:
        do: It is given the signal's number.
    """
    signals = (signal.SIGINT, signal.SIGTERM)

    def handle(number: int, _frame: object) -> None:
        do(number)

    before = [signal.signal(number, handle) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def show_failure(
    options: argparse.Namespace,
) -> Callable[[str, Exception], None]:
    """Show the first failure of a site: the user's last frames, or all of them."""

    def show(place: str, error: Exception) -> None:
        whole = "".join(traceback.format_exception(error))
        tell(f"{place}:\n{whole if options.verbose else last_frames(error)}")

    return show


def complain(error: Exception, options: argparse.Namespace) -> int:
    """Report the error that ended a command, and return its exit code."""
    if options.verbose:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    if not isinstance(error, FederationError):
        tell(f"{type(error).__name__}: {error}")
        if not options.verbose:
            tell("this is an unexpected error; add -v for the traceback")
        return FAILED
    text = str(error)
    job, speeds = (getattr(options, name, None) for name in ("job", "speeds"))
    is_named = any(str(file) in text for file in (job, speeds) if file)
    if isinstance(error, (JobError, SiteError)) and job and not is_named:
        text = f"{job}: {text}"
    if not (options.verbose or isinstance(error, QuorumNotMet)):  # Already shown.
        text = "\n".join([text, *traceback.format_list(frames_of(origin(error)))])
    tell(text.rstrip())
    return exit_codes.of_error(error)
