"""``crossfed ledger recover``: charge again what ledgers of a run have lost."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clients.privacy.site_plans import PrivateSites
from deploy.site_host import (
    config as site_file,
    folder as site_folder,
    home as site_home,
)
from deploy.site_host.agent import SiteAgent
from deploy.site_host.departure import Departure
from deploy.wiring import parts as wiring, run_store
from deploy.wiring.run import Run
from deploy.wiring.store_meters import StoreMeters
from federation.epsilon_text import format_epsilon
from federation.errors import RunNotFound
from federation.ids import RunId
from federation.messages import NO_ANCHOR, join_anchors
from federation.protocols import Clock
from monitoring.runs.find import find_run
from privacy.dp.ledger.ledger_recovery import RecoveryResult
from privacy.secagg.agreement import identity, roster


def at_site(
    config_path: Path, run_id: str, *, clock: Clock, listener: Callable[[str], None]
) -> list[RecoveryResult]:
    """Recover a deployed site's ledger of a run; its agent must be stopped.

    If the site has a home, this machine holds it meanwhile.

    Raises:
        FederationError: The run was not proposed to this site, the agent is running,
            or what is missing cannot be charged.
    """
    config = site_file.load(config_path)
    with (
        site_folder.only_one(config.folder),
        site_home.entered(
            config, departure=Departure(), clock=clock, listener=listener
        ) as held,
    ):
        if held is None:
            raise AssertionError("nothing asks a departure of ours to end")
        agent = SiteAgent(
            config=held,
            identity=identity.load(config.identity),
            roster=roster.load(config.roster),
            clock=clock,
        )
        found = agent.recover(RunId(Path(run_id).name))
        held.confirm()
        return [found]


def in_simulation(name: str, root: Path, *, clock: Clock) -> list[RecoveryResult]:
    """Recover the ledgers of all sites of a run that was simulated here.

    Raises:
        RunNotFound: There is no such run.
        FederationError: Another process works on the run, or what is missing cannot
            be charged.
    """
    run = find_run(name, root)
    job, run_id = run.read_spec(), run.run_id()
    if run_id is None or not job.privacy.differential_privacy.enabled:
        raise RunNotFound(f"the run in {run.path} has no ledgers to recover")
    federation = wiring.build_federation(job)
    place = run_store.RunPlace(job, run, run_id, StoreMeters(clock))
    with (
        run.locked(),
        PrivateSites(federation, run_id=run_id, folder=run.path, clock=clock) as sites,
    ):
        kept = Run(
            federation=federation,
            run_id=run_id,
            clock=clock,
            store=place.store,
            emit=lambda _event: None,
        )
        anchors = join_anchors(kept.checkpoints().anchors(), run.anchors())
        return [
            sites.recover(site, anchors.get(site, NO_ANCHOR)) for site in sites.plans
        ]


def facts(found: RecoveryResult) -> dict[str, Any]:
    """Everything that was done to a ledger, for JSON."""
    aside = found.set_aside
    return {
        **asdict(found),
        "path": os.fspath(found.path),
        "set_aside": None if aside is None else os.fspath(aside),
    }


def lines(found: RecoveryResult) -> Iterator[str]:
    """Describe what was done to a ledger."""
    yield f"ledger      {found.path}"
    if found.set_aside is not None:
        yield f"set aside   {os.fspath(found.set_aside)}: what could not be read"
    for purpose, epsilon in found.epsilon.items():
        before, after = getattr(found.before, purpose), getattr(found.after, purpose)
        yield (
            f"{purpose:<11} {after - before} charges recovered, {after} in all, "
            f"epsilon {format_epsilon(epsilon, places=4)}"
        )
