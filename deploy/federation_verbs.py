"""The verbs of a deployed federation: ``aggregator``, ``site``, ``run`` and its kin."""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import enrolment_verbs, exit_codes
from deploy.exit_codes import DONE
from deploy.terminal import say, tell
from federation.clock import SystemClock
from federation.errors import FederationError, JobError, RunNotFound

if TYPE_CHECKING:
    from deploy.aggregator_file import AggregatorConfig
    from deploy.run_folder import RunFolder
    from deploy.run_queue import Handed
    from federation.events import Emit
    from federation.job import JobSpec

LOOK_SECONDS = 0.2

_AGGREGATOR_TOML = """\
# See docs/howto/two-machines.md. Keys that are left out have their defaults.
listen = "{listen}"
hosts = {hosts}
proxy = {proxy}
"""

Load = Callable[[argparse.Namespace], "JobSpec"]
Progress = Callable[[], contextlib.AbstractContextManager["Emit"]]


def add_verbs(
    verbs: Any,
    job: argparse.ArgumentParser,
    common: argparse.ArgumentParser,
    *,
    load: Load,
    progress: Progress,
) -> None:
    """Add the verbs to the command line.

    Args:
        verbs: The parser's subparsers.
        job: Options that name a job.
        common: Options of every verb.
        load: Reads the job that the options name.
        progress: Shows events.
    """
    _add_aggregator(verbs, common)
    _add_site(verbs, common)
    enrolment_verbs.add_verbs(verbs, common)
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "--aggregator",
        type=Path,
        default=Path("aggregator.toml"),
        metavar="FILE",
        help="the aggregator's configuration (aggregator.toml)",
    )
    run = verbs.add_parser(
        "run",
        parents=[job, common, place],
        allow_abbrev=False,
        help="hand a job to the aggregator of this host, and watch it",
    )
    run.add_argument(
        "--detach", action="store_true", help="do not wait for the run to end"
    )
    run.set_defaults(verb=lambda options: _run(options, load(options), progress))
    ps = verbs.add_parser(
        "ps",
        parents=[common, place],
        allow_abbrev=False,
        help="list the runs that the aggregator was handed",
    )
    ps.set_defaults(verb=_ps)
    for name, verb, text in (
        ("watch", lambda options: _watch(options, progress), "watch a run"),
        ("stop", _stop, "end a run after the round that it is in"),
        ("logs", _logs, "print a run's events as they come"),
    ):
        parser = verbs.add_parser(
            name, parents=[common, place], allow_abbrev=False, help=text
        )
        parser.add_argument("run", metavar="RUN", help="run id or job name")
        parser.set_defaults(verb=verb)


def _add_aggregator(verbs: Any, common: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser(
        "aggregator", allow_abbrev=False, help="the service that sites connect to"
    )
    inner = parser.add_subparsers(required=True, metavar="ACTION")
    init = inner.add_parser(
        "init",
        parents=[common],
        allow_abbrev=False,
        help="make certificates, identity and configuration",
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="a folder of its own")
    init.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address that sites know this host by",
    )
    init.add_argument(
        "--listen", default="0.0.0.0:8443", metavar="ADDRESS:PORT", help="where"
    )
    init.add_argument(
        "--no-proxy",
        action="store_true",
        help="only on a loopback: no nginx before the SuperLink",
    )
    init.add_argument("--organisation", default="", help="who runs it, in words")
    init.set_defaults(verb=_init)
    up = inner.add_parser(
        "up", parents=[common], allow_abbrev=False, help="run the service"
    )
    up.add_argument(
        "--config",
        type=Path,
        default=Path("aggregator.toml"),
        metavar="FILE",
        help="the aggregator's configuration (aggregator.toml)",
    )
    up.set_defaults(verb=_aggregator_up)
    enrolment_verbs.add_aggregator_verbs(inner, common)


def _add_site(verbs: Any, common: argparse.ArgumentParser) -> None:
    parser = verbs.add_parser("site", allow_abbrev=False, help="the agent of one site")
    inner = parser.add_subparsers(required=True, metavar="ACTION")
    up = inner.add_parser(
        "up", parents=[common], allow_abbrev=False, help="run the agent"
    )
    up.add_argument(
        "--config",
        type=Path,
        default=Path("site.toml"),
        metavar="FILE",
        help="the site's configuration (site.toml)",
    )
    up.set_defaults(verb=_site_up)
    relay = inner.add_parser(
        "relay",
        parents=[common],
        allow_abbrev=False,
        help="let a stock SuperNode take part with an existing app of Flower",
    )
    relay.add_argument(
        "--config",
        type=Path,
        default=Path("site.toml"),
        metavar="FILE",
        help="the site's configuration (site.toml)",
    )
    relay.add_argument(
        "--port",
        type=int,
        default=8444,
        metavar="PORT",
        help="where it listens, on the loopback (8444)",
    )
    relay.set_defaults(verb=_site_relay)


def _init(options: argparse.Namespace) -> int:
    from deploy import aggregator_file, keys  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.aggregator_service import initialise  # noqa: PLC0415
    from privacy.secret_files import write_new  # noqa: PLC0415

    folder, hosts = options.folder, options.host or ["localhost"]
    # First: keys are never overwritten, so a mistake must not leave any.
    aggregator_file.check(
        aggregator_file.AggregatorFile(
            listen=options.listen, hosts=tuple(hosts), proxy=not options.no_proxy
        )
    )
    authority = initialise(folder, hosts, clock=SystemClock())
    made = keys.new(
        "aggregator", random_bytes=os.urandom, out=folder / "aggregator.pem"
    )
    keys.trust(
        folder / "roster.toml",
        site=None,
        organisation=options.organisation or hosts[0],
        key=str(made["public_key"]),
    )
    text = _AGGREGATOR_TOML.format(
        listen=options.listen,
        hosts=json.dumps(hosts),
        proxy=json.dumps(not options.no_proxy),
    )
    write_new(folder / "aggregator.toml", text.encode(), mode=0o644)
    facts = {"folder": str(folder), "authority": authority.fingerprint}
    if options.json:
        say(json.dumps({**facts, "identity": made["public_key"]}, indent=2))
        return DONE
    tell(f"an aggregator in {folder}; its authority is {authority.fingerprint}")
    tell(f"start it with: crossfed aggregator up --config {folder}/aggregator.toml")
    return DONE


def _aggregator_up(options: argparse.Namespace) -> int:
    from deploy import aggregator_file  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.aggregator_service import AggregatorService  # noqa: PLC0415

    service = AggregatorService(
        config=aggregator_file.load(options.config),
        config_path=options.config,
        clock=SystemClock(),
        listener=tell,
    )
    with _ended_by_signals(service.stopped):
        service.run()
    return DONE


def _site_up(options: argparse.Namespace) -> int:
    from deploy.site_service import serve  # noqa: PLC0415 -- imports torch and Flower

    stopped = threading.Event()
    with _ended_by_signals(stopped):
        serve(options.config, stopped=stopped, listener=tell)
    return DONE


def _site_relay(options: argparse.Namespace) -> int:
    from deploy.site_relay import serve  # noqa: PLC0415 -- imports Flower

    stopped = threading.Event()
    with _ended_by_signals(stopped):
        serve(options.config, port=options.port, stopped=stopped, listener=tell)
    return DONE


@contextmanager
def _ended_by_signals(stopped: threading.Event) -> Iterator[None]:
    """Set an event at the first Ctrl-C or SIGTERM."""

    def stop(_number: int, _frame: object) -> None:
        stopped.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _run(options: argparse.Namespace, job: "JobSpec", progress: Progress) -> int:
    from deploy import folder_lock, run_queue  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.deployed_run import Parties, check  # noqa: PLC0415
    from deploy.run_folder import RunFolder  # noqa: PLC0415
    from federation.ids import new_run_id  # noqa: PLC0415

    config = _config(options)
    check(job, Parties.load(config.folder).roster)
    now = SystemClock().now()
    name = new_run_id(now, os.urandom(3))
    run = RunFolder(config.runs / job.name / name)
    run_queue.submit(job, run, at=now)
    tell(f"run {name} is handed over")
    if not folder_lock.is_held(config.lock):
        tell("no aggregator works here: it begins with crossfed aggregator up")
    if options.detach:
        say(name)
        return DONE
    return _follow(options, run, progress)


def _follow(options: argparse.Namespace, run: "RunFolder", progress: Progress) -> int:
    """Show a run until it ends; Ctrl-C leaves it alone."""
    from federation.event_log import from_line  # noqa: PLC0415 -- keeps `--help` fast

    try:
        with progress() as show:
            for line in _lines(run, lambda: _is_over(run)):
                event = from_line(line)
                if event is not None:
                    show(event)
    except KeyboardInterrupt:
        tell(f"the run goes on; see it with: crossfed watch {run.path.name}")
        return DONE
    return _tell_outcome(options, run)


def _tell_outcome(options: argparse.Namespace, run: "RunFolder") -> int:
    """Print what a run came to, and return its exit code."""
    from deploy import run_queue  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.outcome import lines  # noqa: PLC0415

    handed = run_queue.read(run)
    if handed is None or handed.outcome is None:
        raise RunNotFound(f"the run in {run.path} has gone")
    if options.json and run.result.is_file():
        say(run.result.read_text())
    elif run.exists():
        for text in lines(run.view()):
            say(text)
        say(f"run         {run.path}")
        say(f"report      {run.report}")
    if handed.outcome.code != DONE:
        tell(handed.outcome.message)
    return handed.outcome.code


def _is_over(run: "RunFolder") -> bool:
    from deploy.run_queue import OUTCOME  # noqa: PLC0415

    return (run.path / OUTCOME).exists()


def _lines(run: "RunFolder", is_over: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the lines of a run's events as they are written, until it is over."""
    clock, torn = SystemClock(), b""
    while not run.events.exists():
        if is_over():
            return
        clock.sleep(LOOK_SECONDS)
    with run.events.open("rb") as events:
        while True:
            over = is_over()  # Before the read: what it finds is then all.
            more = events.read()
            *whole, torn = (torn + more).split(b"\n")
            yield from whole
            if over and not more:
                return
            if not more:
                clock.sleep(LOOK_SECONDS)


def _ps(options: argparse.Namespace) -> int:
    from deploy import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    queue = run_queue.handed_over(_config(options).runs)
    for one in queue.damaged:
        tell(f"run {one.run.path.name} is left alone: {one.reason}")
    rows = [_row(one) for one in queue.runs]
    if options.json:
        say(json.dumps(rows, indent=2))
        return DONE
    _print_table(("run", "job", "status", "rounds"), rows)
    return DONE


def _row(handed: "Handed") -> dict[str, Any]:
    status = "waiting"
    if handed.outcome is not None:
        status = exit_codes.status_of(handed.outcome.code)
    elif handed.coordinator is not None:
        status = "running"
    return {
        "run": handed.run.path.name,
        "job": handed.run.path.parent.name,
        "status": status,
        "rounds": handed.rounds,
    }


def _print_table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(row[name])) for name in names))
    width = None if sys.stdout.isatty() else 200
    Console(highlight=False, width=width).print(table)


def _watch(options: argparse.Namespace, progress: Progress) -> int:
    return _follow(options, _find(options), progress)


def _logs(options: argparse.Namespace) -> int:
    run = _find(options)
    with contextlib.suppress(KeyboardInterrupt):
        for line in _lines(run, lambda: _is_over(run)):
            print(line.decode(errors="replace"), flush=True)  # noqa: T201
    return DONE


def _stop(options: argparse.Namespace) -> int:
    from deploy import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    run = _find(options)
    if _is_over(run):
        raise FederationError(f"run {run.path.name} has ended already")
    run_queue.ask_to_stop(run)
    tell(f"run {run.path.name} ends after the round that it is in")
    return DONE


def _find(options: argparse.Namespace) -> "RunFolder":
    from deploy import run_queue  # noqa: PLC0415 -- keeps `--help` fast

    config, name = _config(options), options.run
    queue = run_queue.handed_over(config.runs)
    newest = [one.run for one in reversed(queue.runs)]
    for run in (*newest, *(one.run for one in queue.damaged)):
        if name in {run.path.name, run.path.parent.name}:
            return run
    raise RunNotFound(f"the aggregator was handed no run {name!r}: see crossfed ps")


def _config(options: argparse.Namespace) -> "AggregatorConfig":
    from deploy import aggregator_file  # noqa: PLC0415 -- keeps `--help` fast

    if not options.aggregator.is_file():
        raise JobError(
            f"there is no {options.aggregator}: name the aggregator's configuration "
            "with --aggregator, on the aggregator's host"
        )
    return aggregator_file.load(options.aggregator)
