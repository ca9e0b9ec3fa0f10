"""What commands say: data on standard output, and words on standard error."""

import argparse
import contextlib
import json
import sys
import traceback
from typing import Any

from deploy import exit_codes
from deploy.exit_codes import FAILED
from federation.errors import FederationError, JobError, SiteError


def say(text: str) -> None:
    """Write a line of data."""
    sys.stdout.write(text + "\n")


def say_json(value: Any) -> None:
    """Write plain values as JSON."""
    say(json.dumps(value, indent=2))


def tell(text: str) -> None:
    """Tell a person something, if there is anybody left to read it."""
    with contextlib.suppress(OSError):
        print(f"crossfed: {text}", file=sys.stderr, flush=True)  # noqa: T201


def complain(error: Exception, options: argparse.Namespace) -> int:
    """Tell a person what ended a command, and return its exit code."""
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
