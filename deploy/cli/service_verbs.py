"""Verbs of the long-lived processes: ``aggregator`` and ``site``."""

import argparse
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import service_manager
from deploy.cli.terminal import interrupts, say, say_json, tell
from deploy.exit_codes import DONE, FAILED
from deploy.service_log import service_log
from deploy.service_manager import Notify
from federation.errors import FederationError

if TYPE_CHECKING:
    from deploy.site_host.service import SiteNode
    from federation.protocols import Clock


def _init(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config, new_aggregator  # noqa: PLC0415 -- --help

    folder, hosts = options.folder, options.host or ["localhost"]
    made = new_aggregator.create(
        folder,
        hosts,
        listen=options.listen,
        proxy=not options.no_proxy,
        organisation=options.organisation,
        random_bytes=os.urandom,
        clock=options.clock,
    )
    if options.no_proxy:
        tell(config.NO_PROXY)
    if options.json:
        say_json({"folder": str(folder), **asdict(made)})
        return DONE
    tell(f"created an aggregator in {folder}; its authority is {made.authority}")
    tell(f"start it with: crossfed aggregator up --config {folder}/aggregator.toml")
    return DONE


def _aggregator_up(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.aggregator_host.service import AggregatorService  # noqa: PLC0415

    notify = service_manager.notify_from_environment()
    service = AggregatorService(
        config=aggregator_file.load(options.config),
        config_path=options.config,
        clock=options.clock,
        listener=_told_to(notify, options.clock),
        notify=notify,
    )
    with interrupts(lambda _: service.stopped.set()):
        service.run()
    return DONE


def _aggregator_page(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file  # noqa: PLC0415
    from deploy.aggregator_host.monitor_process import address  # noqa: PLC0415

    found = address(aggregator_file.load(options.config))
    if options.json:
        say_json({"address": found})
    else:
        say(found)
    return DONE


def _site_up(options: argparse.Namespace) -> int:
    if not options.config.is_dir():
        return _agent(options)
    from deploy.site_host import service, several  # noqa: F401, PLC0415 -- for all forks

    stopped = threading.Event()

    def run(config: Path) -> int:
        try:
            return _agent(argparse.Namespace(**{**vars(options), "config": config}))
        except FederationError as error:
            tell(str(error))
            return FAILED

    with interrupts(lambda _: stopped.set()):
        log = service_log(options.clock)
        agents = several.Agents(run, clock=options.clock, listener=log)
        agents.serve(several.configs_below(options.config), stopped)
    return DONE


def _agent(options: argparse.Namespace) -> int:
    from deploy import graceful_exit  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.site_host.departure import Departure  # noqa: PLC0415 -- imports numpy
    from deploy.site_host.service import serve  # noqa: PLC0415 -- imports torch and Flower
    from federation.messages import LeaveReason  # noqa: PLC0415 -- imports numpy

    notify = service_manager.notify_from_environment()
    departure, log = Departure(), service_log(options.clock)

    def code() -> int:
        if not departure.lost:
            return DONE
        log(departure.lost)  # It would be the error, if the process ended by itself.
        return FAILED

    end = graceful_exit.GracefulExit(
        departure.stopped, log, code, departure.await_kept, departure.last_words
    )

    def stop(number: int) -> None:
        is_person = number == signal.SIGINT
        departure.now(LeaveReason.OPERATOR if is_person else LeaveReason.SIGTERM)

    def begun(node: "SiteNode") -> None:
        end.say_before(node.leave)
        # Not when it is connected: an aggregator that is down must not keep a machine
        # from starting. The status says which it is.
        notify(service_manager.READY)

    with interrupts(stop):
        serve(
            options.config,
            departure=departure,
            clock=options.clock,
            listener=_told_to(notify, options.clock),
            begun=begun,
            standby=lambda: notify(service_manager.READY),
            take_over=options.take_over,
        )
        log("the agent has ended on request; no task was at work")
        graceful_exit.leave()
    return DONE


def _site_status(options: argparse.Namespace) -> int:
    from deploy.site_host import config as site_file, site_page  # noqa: PLC0415
    from deploy.site_host.run_status import lines, status  # noqa: PLC0415 -- as above

    config = site_file.load(options.config)
    found = status(config)
    page = site_page.address(config) if found.is_up else ""  # Its agent serves it.
    if options.json:
        renewal = found.certificate_renewal
        say_json(
            {**asdict(found), "certificate_renewal": renewal, "page": page or None}
        )
        return DONE
    if page:
        tell(f"its page: {page}")
    for line in lines(found, options.clock.now()):
        say(line)
    return DONE


def _site_relay(options: argparse.Namespace) -> int:
    from deploy.site_host.relay import serve  # noqa: PLC0415 -- imports Flower

    stopped = threading.Event()
    with interrupts(lambda _: stopped.set()):
        serve(
            options.config,
            port=options.port,
            stopped=stopped,
            clock=options.clock,
            listener=service_log(options.clock),
        )
    return DONE


def _site_model(options: argparse.Namespace) -> int:
    from deploy.tools.site_model import write_deployed_site_model  # noqa: PLC0415 -- imports torch

    run = write_deployed_site_model(
        options.config, options.run, options.model, options.out
    )
    if options.json:
        say_json({"run_id": run, "path": str(options.out)})
    else:
        say(str(options.out))
    return DONE


def _told_to(notify: Notify, clock: "Clock") -> Callable[[str], None]:
    """Return a function that reports to a person and to the service manager."""
    log = service_log(clock)

    def listener(text: str) -> None:
        log(text)
        notify(service_manager.status(text))

    return listener


VERBS = {
    "aggregator init": _init,
    "aggregator up": _aggregator_up,
    "aggregator page": _aggregator_page,
    "site up": _site_up,
    "site status": _site_status,
    "site relay": _site_relay,
    "site model": _site_model,
}
