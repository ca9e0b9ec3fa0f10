"""Verbs of the processes that stay: ``aggregator`` and ``site``."""

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from deploy import service_manager
from deploy.cli.terminal import interrupts, say_json, tell
from deploy.exit_codes import DONE
from deploy.service_manager import Notify

if TYPE_CHECKING:
    from cloud_adapters.flower.node import FlowerNode

_AGGREGATOR_TOML = """\
# See docs/howto/two-machines.md. Keys that are left out have their defaults.
listen = "{listen}"
hosts = {hosts}
proxy = {proxy}
"""


def _init(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file  # noqa: PLC0415 -- --help
    from deploy.aggregator_host.service import initialise  # noqa: PLC0415
    from privacy.membership import key_files as keys, roster_file  # noqa: PLC0415 -- --help
    from privacy.secret_files import write_new  # noqa: PLC0415

    folder, hosts = options.folder, options.host or ["localhost"]
    # First: keys are never overwritten, so a mistake must not leave any.
    aggregator_file.check(
        aggregator_file.AggregatorFile(
            listen=options.listen, hosts=tuple(hosts), proxy=not options.no_proxy
        )
    )
    authority = initialise(folder, hosts, clock=options.clock)
    made = keys.new(
        "aggregator", random_bytes=os.urandom, out=folder / "aggregator.pem"
    )
    roster_file.trust(
        folder / "roster.toml",
        site=None,
        organisation=options.organisation or hosts[0],
        key=made.public_key,
    )
    text = _AGGREGATOR_TOML.format(
        listen=options.listen,
        hosts=json.dumps(hosts),
        proxy=json.dumps(not options.no_proxy),
    )
    write_new(folder / "aggregator.toml", text.encode(), mode=0o644)
    facts = {"folder": str(folder), "authority": authority.fingerprint}
    if options.json:
        say_json({**facts, "identity": made.public_key})
        return DONE
    tell(f"an aggregator in {folder}; its authority is {authority.fingerprint}")
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
        listener=_told_to(notify),
        notify=notify,
    )
    with interrupts(lambda _: service.stopped.set()):
        service.run()
    return DONE


def _site_up(options: argparse.Namespace) -> int:
    from deploy import prompt_end  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.site_host.service import serve  # noqa: PLC0415 -- imports torch and Flower
    from federation.messages import LeaveReason  # noqa: PLC0415 -- imports numpy

    notify = service_manager.notify_from_environment()
    stopped = threading.Event()
    why: list[LeaveReason] = []
    end = prompt_end.PromptEnd(stopped, tell)

    def stop(number: int) -> None:
        is_person = number == signal.SIGINT
        why.append(LeaveReason.OPERATOR if is_person else LeaveReason.SIGTERM)
        stopped.set()

    def begun(node: "FlowerNode") -> None:
        end.say_before(node.leave)
        # Not when it is connected: an aggregator that is down must not keep a machine
        # from starting. The status says which it is.
        notify(service_manager.READY)

    with interrupts(stop):
        serve(
            options.config,
            stopped=stopped,
            leaves=lambda: why[0] if why else None,
            clock=options.clock,
            listener=_told_to(notify),
            begun=begun,
        )
        prompt_end.leave()
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
            listener=tell,
        )
    return DONE


def _told_to(notify: Notify) -> Callable[[str], None]:
    """What tells a person and the service manager the same."""

    def listener(text: str) -> None:
        tell(text)
        notify(service_manager.status(text))

    return listener


VERBS = {
    "aggregator init": _init,
    "aggregator up": _aggregator_up,
    "site up": _site_up,
    "site relay": _site_relay,
}
