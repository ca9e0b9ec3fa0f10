"""Verbs of runs across machines: ``run``, ``ps``, ``watch``, ``stop`` and ``logs``."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import exit_codes
from deploy.cli import remote_runs
from deploy.cli.arguments import load_job
from deploy.cli.run_progress import run_progress
from deploy.cli.simulate_verb import print_statistics
from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.cli.web import live_page
from deploy.exit_codes import DONE, STOPPED
from federation.errors import FederationError, JobError, RunNotFound
from monitoring import units

if TYPE_CHECKING:
    from deploy.aggregator_host.config import AggregatorConfig
    from deploy.aggregator_host.run_queue import Outcome, Queue
    from federation.protocols import Clock
    from monitoring.runs.run_folder import RunFolder
    from monitoring.web.app import Shown

_DEFAULT_AGGREGATOR = Path("aggregator.toml")  # As in verbs.toml.
LOOK_SECONDS = 0.2
START_LOOK_SECONDS = 0.5  # Of all submitted runs.
_SOON_SECONDS = 15.0  # No forecast is better, since rounds and starts take as long.
PAUSE_SECONDS = 3.0  # A coordinator that ends leaves its outcome before.


def _run(options: argparse.Namespace) -> int:
    if remote_runs.is_remote(options):
        return remote_runs.run(options)
    job = load_job(options)
    from deploy.aggregator_host import admission, run_queue  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.aggregator_host.parties import Parties, check, submitted  # noqa: PLC0415
    from deploy.wiring import extension  # noqa: PLC0415 -- keeps `--help` fast
    from federation import folder_lock  # noqa: PLC0415 -- keeps `--help` fast
    from federation.job import code_files, job_file  # noqa: PLC0415

    config = _config(options)
    now, owner = options.clock.now(), options.owner or run_queue.OPERATOR
    extend = options.extend is not None
    if options.resume or extend:
        run = run_queue.find_ended(job, config.runs, owner=owner, extend=extend)
        resumed = run.run_id() is not None
        found = extension.check(job, run) if extend else None
        joins = found is not None and bool(found.joined)
        parties = (
            Parties.load(config.folder) if joins else Parties.of_run(config.folder, run)
        )
        check(job, parties, resumed=resumed)
        if joins:  # Before it is on record that the run needs this roster.
            parties.keep(run)
        if found is not None:
            extension.record(job, run, options.clock)
        run_queue.take_up(run, at=now)
    else:
        # Its coordinator builds the model; only sites load data.
        tables = ("model", "training", "aggregation")
        needed = {key: job_file.document(job)[key] for key in tables}
        code_files.check_present(needed, options.aggregator.parent)
        admission.check_submission(config, job, owner, options.priority, now=now)
        run = submitted(
            job,
            config.folder,
            config.runs,
            at=now,
            random_bytes=os.urandom,
            owner=owner,
            priority=options.priority,
        )
    name = run.path.name
    tell(f"run {name} is submitted")
    if not folder_lock.is_held(config.lock):
        tell(
            "no aggregator is running here: the run starts after crossfed aggregator up"
        )
    if options.detach:
        _say_run(options, run, "waiting")
        return DONE
    return follow(options, run)


def follow(
    options: argparse.Namespace,
    run: "RunFolder",
    look: Callable[[], None] = lambda: None,
    is_pause: Callable[[], bool] = lambda: False,
) -> int:
    """Show a run until it ends; Ctrl-C does not stop the run.

    Args:
        options: Options of the verb.
        run: Folder whose events are shown.
        look: Called again and again while nothing happens in it.
        is_pause: Whether the caller resumes it if it was stopped: that is no outcome.
    """
    try:
        _await_start(run, _config(options), options.clock, look)
        every = _evaluation_every(run)
        with run_progress(options.clock, every=every) as show:
            pauses = _Pauses(run, _config(options), options.clock)

            def idle() -> None:
                pauses.look()
                look()

            over = partial(is_over, run)
            take = remote_runs.shown_events(str(run.events), show)
            for line in _lines(run, over, options.clock, idle=idle):
                take(line)
    except KeyboardInterrupt:
        if not is_over(run) or is_pause():
            watch = _command(options, "watch", run.path.name)
            tell(f"the run continues; see it with: {watch}")
            return DONE
    outcome = _outcome(run)
    if outcome.code == STOPPED and is_pause():
        return STOPPED
    return _tell_outcome(options, run, outcome)


def _evaluation_every(run: "RunFolder") -> int:
    """How often the run's models are evaluated."""
    try:
        return run.read_spec().evaluation.every
    except FederationError:  # It shows the events even so; its lines may come later.
        return 1


def _command(options: argparse.Namespace, verb: str, run: str) -> str:
    """A command about a run, for the folder where this one was given."""
    words = ["crossfed", verb, run]
    if options.aggregator != _DEFAULT_AGGREGATOR:
        words += ["--aggregator", str(options.aggregator)]
    return shlex.join(words)


def _await_start(
    run: "RunFolder",
    config: "AggregatorConfig",
    clock: "Clock",
    look: Callable[[], None] = lambda: None,
) -> None:
    """Report what a run waits for, until it starts or is over."""
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    told = ""
    while not run.exists() and not is_over(run):
        queue = run_queue.handed_over(run.path.parents[1])
        text = _waits_for(run, queue, config, clock.now())
        if text and text != told:
            tell(text)
        told = text
        look()
        clock.sleep(START_LOOK_SECONDS)


def _waits_for(
    run: "RunFolder", queue: "Queue", config: "AggregatorConfig", now: float
) -> str:
    from deploy.aggregator_host import admission  # noqa: PLC0415 -- keeps `--help` fast

    turns = admission.admission(config, queue.runs, None, now=now).plan().waits
    return admission.waits_for(run, queue, turns)


def _outcome(run: "RunFolder") -> "Outcome":
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    handed = run_queue.read(run)
    if handed is None or handed.outcome is None:
        raise RunNotFound(f"the run in {run.path} no longer exists")
    return handed.outcome


def _tell_outcome(
    options: argparse.Namespace, run: "RunFolder", outcome: "Outcome"
) -> int:
    """Print a run's outcome, and return its exit code."""
    from monitoring.terminal.outcome import lines  # noqa: PLC0415

    status, found = exit_codes.status_of(outcome.code), run.read_statistics()
    if options.json and run.result.is_file():
        asked = {} if found is None else {"statistics": found.document()}
        # Its last coordinator may not have known how the run would end.
        known = json.loads(run.result.read_text())
        say_json({**known, **asked, "status": status})
    elif options.json:
        _say_run(options, run, status)
    elif run.exists():
        if found is not None:
            print_statistics(found)
        # A job that no site accepts ends before the first event: its message says so.
        with contextlib.suppress(RunNotFound):
            view, _ = run.whole_view()  # Who followed it has read of any damage.
            for text in lines(view, status=status):
                say(text)
        say(f"run         {run.path}")
        if run.report.is_file():
            say(f"report      {run.report}")
    if outcome.code != DONE:
        tell(outcome.message)
    return outcome.code


def _say_run(options: argparse.Namespace, run: "RunFolder", status: str) -> None:
    name = run.path.name
    if options.json:
        say_json({"status": status, "run_id": name, "folder": str(run.path)})
    else:
        say(name)


def is_over(run: "RunFolder") -> bool:
    """Whether a run has ended, in any way."""
    from deploy.aggregator_host.run_queue import OUTCOME  # noqa: PLC0415

    return (run.path / OUTCOME).exists()


class _Pauses:
    """Reports what a started run waits for if no coordinator works on it."""

    def __init__(
        self, run: "RunFolder", config: "AggregatorConfig", clock: "Clock"
    ) -> None:
        self._run, self._config, self._clock = run, config, clock
        self._since, self._told = clock.monotonic(), ""

    def look(self) -> None:
        """Report it once, and again when it changes."""
        now = self._clock.monotonic()
        if self._run.is_locked():
            self._since, self._told = now, ""
        elif now - self._since > PAUSE_SECONDS and not is_over(self._run):
            text = self._reason()
            if text != self._told:
                tell(text)
            self._told = text

    def _reason(self) -> str:
        from deploy.aggregator_host import disk_reserve, run_queue  # noqa: PLC0415
        from federation import folder_lock  # noqa: PLC0415 -- as above
        from monitoring.terminal.progress import ANOTHER  # noqa: PLC0415

        if shortage := disk_reserve.shortage(self._config):
            return f"run {self._run.path.name} waits for space: {shortage}"
        queue = run_queue.handed_over(self._run.path.parents[1])
        known = next((one for one in queue.runs if one.run == self._run), None)
        if (
            known is None or known.coordinator is None
        ):  # It is damaged, or has made way.
            return _waits_for(self._run, queue, self._config, self._clock.now())
        text = f"run {self._run.path.name} has no coordinator"
        if folder_lock.is_held(self._config.lock):
            return f"{text}: if it was killed, {ANOTHER} and waits for its sites"
        return (
            f"{text}, and no aggregator is running here: the run resumes automatically "
            "after crossfed aggregator up"
        )


def _lines(
    run: "RunFolder",
    is_over: Callable[[], bool],
    clock: "Clock",
    *,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[bytes]:
    """Yield the lines of a run's events as they are written, until it is over."""
    while not run.events.exists():
        if is_over():
            return
        clock.sleep(LOOK_SECONDS)
    with run.events.open("rb") as events:
        while True:
            over = is_over()  # Before the read: what it finds is then all.
            begin = events.tell()
            *whole, torn = events.read().split(b"\n")
            yield from whole
            if over and not whole:
                return
            # Not kept: it goes when its writer was killed and another continues.
            events.seek(-len(torn), os.SEEK_CUR)
            if events.tell() == begin:
                idle()
                clock.sleep(LOOK_SECONDS)


def _ps(options: argparse.Namespace) -> int:
    if remote_runs.is_remote(options):
        return _say_rows(options, remote_runs.rows(options))
    from deploy.aggregator_host import (  # noqa: PLC0415 -- keeps `--help` fast
        admission,
        disk_reserve,
        run_notes,
        run_queue,
    )
    from federation import folder_lock  # noqa: PLC0415 -- keeps `--help` fast

    config = _config(options)
    queue = run_queue.handed_over(config.runs)
    if not folder_lock.is_held(config.lock):
        tell(
            "no aggregator is running here: no run goes on until crossfed aggregator up"
        )
    if shortage := disk_reserve.shortage(config):
        tell(shortage)
    for one in queue.damaged:
        tell(f"run {one.run.path.name} is not started: {one.reason}")
    for damage in (run_notes.read(one.run.events).damage for one in queue.runs):
        if damage:
            tell(f"{damage}; what that line said is left out")
    now = options.clock.now()
    return _say_rows(options, admission.rows(config, queue.runs, now=now))


def _say_rows(options: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    if options.json:
        say_json(rows)
        return DONE
    from monitoring.privacy_words import NOISY  # noqa: PLC0415 -- keeps `--help` fast

    for row in rows:
        begins, row["starts"] = row["starts_in_seconds"], ""
        if begins is not None:
            is_soon = begins < _SOON_SECONDS
            row["starts"] = "soon" if is_soon else f"in {units.format_duration(begins)}"
        row["age"] = units.format_duration(row["age_seconds"])
        noisy, loss = NOISY if row.get("is_noisy") else "", row["loss"]
        row["loss"] = "" if loss is None else noisy + units.format_number(loss)
    names = ["run", "job", "status", "age", "rounds", "loss", "without", "back"]
    if any(row["owner"] != "operator" or row["priority"] for row in rows):
        names[2:2] = ["owner", "priority"]
    names += [name for name in ("waits", "starts") if any(row[name] for row in rows)]
    cut = "reason" if any(row["reason"] for row in rows) else ""
    names += [cut] if cut else []
    cells = ([_cell(row[name]) for name in names] for row in rows)
    if say_table(names, cells, cut=cut):
        tell(f"see the whole reason with: {_command(options, 'logs', 'RUN')}")
    return DONE


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else "; ".join(value)


def _watch(options: argparse.Namespace) -> int:
    if remote_runs.is_remote(options):
        if options.web:
            raise JobError(
                "the page is served where the run's files are: use it at the "
                "aggregator",
                key="--web",
            )
        return remote_runs.watch(options)

    def pages() -> "Shown":
        from deploy.aggregator_host import run_list  # noqa: PLC0415 -- imports much

        return run_list.of_aggregator(_config(options), options.clock, run)

    run = _find(options)
    with live_page(options, pages, run=run):
        return follow(options, run)


def _logs(options: argparse.Namespace) -> int:
    if remote_runs.is_remote(options):
        return remote_runs.logs(options)
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.terminal.progress import PlainProgress  # noqa: PLC0415

    run = _find(options)
    progress = PlainProgress(sys.stdout, every=_evaluation_every(run))
    over = partial(is_over, run) if options.follow else lambda: True
    with contextlib.suppress(KeyboardInterrupt), progress:
        log, as_lines = str(run.events), options.json
        take = remote_runs.shown_events(log, progress, as_lines=as_lines)
        for line in _lines(run, over, options.clock):
            take(line)
            sys.stdout.flush()
    handed = run_queue.read(run)
    if handed is not None and handed.reason:
        tell(f"run {run.path.name} {handed.status}: {handed.reason}")
    elif not run.exists():
        queue = run_queue.handed_over(run.path.parents[1])
        tell(_waits_for(run, queue, _config(options), options.clock.now()))
    elif not is_over(run):
        tell(f"run {run.path.name} goes on: add --follow to see what comes")
    return DONE


def _stop(options: argparse.Namespace) -> int:
    if remote_runs.is_remote(options):
        return remote_runs.stop(options)
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    run = _find(options)
    if is_over(run):
        raise FederationError(f"run {run.path.name} has ended already")
    run_queue.ask_to_stop(run, at=options.clock.now())
    if options.json:
        _say_run(options, run, "stopping")
    handed = run_queue.read(run)
    works = handed is not None and handed.coordinator is not None
    tell(f"run {run.path.name} {remote_runs.stop_words(works=works)}")
    return DONE


def _find(options: argparse.Namespace) -> "RunFolder":
    from deploy.aggregator_host import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    config, name = _config(options), options.run
    queue = run_queue.handed_over(config.runs)
    newest = [one.run for one in reversed(queue.runs)]
    for run in (*newest, *(one.run for one in queue.damaged)):
        if name in {run.path.name, run.path.parent.name}:
            return run
    raise RunNotFound(
        f"no run {name!r} was submitted to the aggregator: see crossfed ps"
    )


def _config(options: argparse.Namespace) -> "AggregatorConfig":
    from deploy.aggregator_host import config as aggregator_file  # noqa: PLC0415 -- keeps `--help` fast

    if not options.aggregator.is_file():
        raise JobError(
            f"there is no {options.aggregator}: run this on the aggregator's host, and "
            "give its configuration with --aggregator"
        )
    return aggregator_file.load(options.aggregator)


VERBS = {
    "run": _run,
    "ps": _ps,
    "watch": _watch,
    "stop": _stop,
    "logs": _logs,
}
