"""Verbs about an owner's runs at an aggregator elsewhere, with the owner's token."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import exit_codes
from deploy.cli.arguments import load_job
from deploy.cli.run_progress import run_progress
from deploy.cli.terminal import say, say_json, tell
from deploy.exit_codes import DONE
from federation.errors import JobError

if TYPE_CHECKING:
    from federation.events import Emit
    from federation.protocols import Clock

SCHEME = "https://"
TOKEN, TOKEN_FILE = "CROSSFED_TOKEN", "CROSSFED_TOKEN_FILE"
LOOK_SECONDS = 1.0


class RemoteRuns:
    """An owner's way to its runs.

    Args:
        url: ``https://HOST:PORT`` of the aggregator.
        clock: Tells time.

    Attributes:
        owner: Whose token it has.
    """

    def __init__(self, url: str, clock: "Clock") -> None:
        """Read the token, and check that the aggregator is the one that made it."""
        from deploy.site_host.enrolment_connection import Aggregator  # noqa: PLC0415
        from privacy.membership.token import Token  # noqa: PLC0415 -- keeps `--help` fast

        token, address = Token.parse(_token_text()), url.removeprefix(SCHEME)
        self.owner = token.site
        self._secret, self._clock = token.secret.hex(), clock
        root = Aggregator(address.rstrip("/"), b"").authority(token.authority)
        self._way: Aggregator = Aggregator(address.rstrip("/"), root, path="/owner")

    def ask(self, action: str, **about: Any) -> Any:
        """Ask the aggregator, and return what it answers.

        Raises:
            EnrolmentRefused: It refuses, or cannot be reached.
        """
        asked = {"secret": self._secret, "action": action, **about}
        return json.loads(self._way.post(json.dumps(asked).encode()))

    def read(
        self, run: str, show: Callable[[str], None], *, follow: bool
    ) -> dict[str, Any]:
        """Show the lines of a run's events, and report what it waits for.

        Args:
            run: Its ID, or the job's name.
            show: Called with each line.
            follow: Whether to go on until the run ends.

        Returns:
            How the run stands after the last line.
        """
        offset, told = 0, ""
        while True:
            found: dict[str, Any] = self.ask("events", run=run, offset=offset)
            offset = found["offset"]
            for line in found["lines"].splitlines():
                show(line)
            if found["lines"]:
                continue
            if found["code"] is not None or not follow:
                return found
            if found["waits"] and found["waits"] != told:
                tell(f"run {found['run']} waits for {found['waits']}")
            told = found["waits"]
            self._clock.sleep(LOOK_SECONDS)


def is_remote(options: argparse.Namespace) -> bool:
    """Whether a verb is about an aggregator elsewhere."""
    return isinstance(options.aggregator, str)


def _token_text() -> str:
    """The token, from a file or the environment: all users can read a command line."""
    text, name = os.environ.get(TOKEN, ""), os.environ.get(TOKEN_FILE, "")
    if name and not text:
        from privacy.secret_files import read_private  # noqa: PLC0415 -- as above

        text = read_private(Path(name)).decode(errors="replace")
    if not text.strip():
        raise JobError(
            f"an aggregator elsewhere asks for an owner's token: set {TOKEN_FILE} to a "
            f"file that holds it and that only you can read, or {TOKEN} to the token",
            key="--aggregator",
        )
    return text


def run(options: argparse.Namespace) -> int:
    """Submit a job, and watch it."""
    import tomli_w  # noqa: PLC0415 -- keeps `--help` fast

    from federation.job import job_file  # noqa: PLC0415 -- as above

    if options.resume or options.extend is not None:
        raise JobError("is for the aggregator's operator", key="--resume")
    job = load_job(options)
    runs = RemoteRuns(options.aggregator, options.clock)
    if options.owner not in {None, runs.owner}:
        raise JobError(f"the token is that of owner {runs.owner!r}", key="--owner")
    text = tomli_w.dumps(job_file.document(job))
    name = runs.ask("submit", job=text, priority=options.priority)["run"]
    tell(f"run {name} is submitted")
    if options.detach:
        if options.json:
            say_json({"status": "waiting", "run_id": name})
        else:
            say(name)
        return DONE
    code = _follow(options, runs, name, every=job.evaluation.every)
    if code == DONE and job.statistics is not None:
        tell(
            "the aggregator keeps what the run finds: its operator reads it with "
            f"crossfed stats {name} --root FOLDER/runs, beside aggregator.toml"
        )
    return code


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Describe the owner's runs, as ``crossfed ps`` shows them."""
    found: list[dict[str, Any]] = RemoteRuns(options.aggregator, options.clock).ask(
        "runs"
    )
    return found


def watch(options: argparse.Namespace) -> int:
    """Show the progress of a run."""
    runs = RemoteRuns(options.aggregator, options.clock)
    return _follow(options, runs, options.run, every=1)


def _follow(
    options: argparse.Namespace, runs: RemoteRuns, name: str, *, every: int
) -> int:
    try:
        with run_progress(options.clock, every=every) as show:
            take = shown_events(f"events.jsonl of {name}", show)
            last = runs.read(name, take, follow=True)
    except KeyboardInterrupt:
        tell(f"the run continues; see it with crossfed watch {name}")
        return DONE
    status = exit_codes.status_of(last["code"])
    if options.json:
        say_json({"status": status, "run_id": last["run"]})
    else:
        say(f"run {last['run']} {status}")
    if last["code"] != DONE:
        tell(last["message"])
    return int(last["code"])


def shown_events(
    log: str, show: "Emit", *, as_lines: bool = False
) -> Callable[[str | bytes], None]:
    """Return what takes the lines of a log in order and shows those that are events.

    The first line that is damaged is reported.

    Args:
        log: The log's name.
        show: Called with each event.
        as_lines: Whether to print the lines instead.
    """
    from federation.event_log import from_line  # noqa: PLC0415 -- keeps `--help` fast

    number, damaged = 0, 0

    def take(line: str | bytes) -> None:
        nonlocal number, damaged
        number += 1
        try:
            event = from_line(line)
        except ValueError as error:
            damaged += 1
            if damaged == 1:
                tell(f"{log}, line {number}: {error}; damaged lines are left out")
            return
        if as_lines:
            say(line if isinstance(line, str) else line.decode())
        elif event is not None:
            show(event)

    return take


def logs(options: argparse.Namespace) -> int:
    """Print a run's events."""
    from monitoring.terminal.progress import PlainProgress  # noqa: PLC0415

    runs = RemoteRuns(options.aggregator, options.clock)
    progress = PlainProgress(sys.stdout, every=1)
    log = f"events.jsonl of {options.run}"
    show = shown_events(log, progress, as_lines=options.json)
    with contextlib.suppress(KeyboardInterrupt), progress:
        runs.read(options.run, show, follow=options.follow)
    return DONE


def stop_words(*, works: bool) -> str:
    """What becomes of a run that is stopped: a coordinator works on it, or none."""
    return "ends after its current round" if works else "ends without another round"


def stop(options: argparse.Namespace) -> int:
    """Stop a run after its round."""
    found = RemoteRuns(options.aggregator, options.clock).ask("stop", run=options.run)
    if options.json:
        say_json({"status": "stopping", "run_id": found["run"]})
    tell(f"run {found['run']} {stop_words(works=found['begun'])}")
    return DONE
