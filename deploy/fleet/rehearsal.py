"""A deployment of clouds on this host: the same file, without machines that cost.

Pure: a plan in, a plan out. Keys, runs and ledgers of a rehearsal are in a folder of
its own, so nothing of it is mistaken for that of the sites themselves; and it neither
reads what only a site's own machine may, nor writes where that does.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.tables.aggregator_machine import AggregatorMachine
from deploy.fleet.tables.providers import CONTAINER, LOCAL
from deploy.fleet.tables.site_machine import CloudMachine, LineSpec, SiteMachine
from deploy.fleet.tables.start_spec import StartSpec
from deploy.site_host.config import LocalDataSpec
from deploy.site_host.home_spec import HomeSpec
from deploy.wiring.exchange import ExchangeSpec
from federation.errors import JobError

# What of a cloud's machine is not on this host.
_OF_MACHINES = ("notices", "gpus")
_IMAGES = re.compile(r"[A-Za-z0-9][\w.:/-]*:\w[\w.-]{0,127}", re.ASCII)


def on_this_host(plan: DeploymentPlan, *, images: str = "") -> DeploymentPlan:
    """Have a deployment run on this host, whatever its sites' providers are.

    Sites that the file has on this host keep their data, and without ``images`` their
    form, too. Others have the part of the job's dataset that a simulation gives them.

    Args:
        plan: The deployment.
        images: Has every party be a container of the image ``IMAGES-PARTY:TAG``, in
            which ``IMAGES:TAG`` is what is given here; empty for processes.

    Raises:
        JobError: ``images`` is not of this form.
    """
    if images and not _IMAGES.fullmatch(images):
        raise JobError(f"{images!r} is not of the form NAME:TAG", key="--images")
    file = plan.file
    sites = tuple(_site(site, images) for site in file.sites)
    place = plan.folder
    form = "containers" if images else "local"
    settings = {
        site.name: _settings(site, plan.settings[site.name]) for site in file.sites
    }
    aggregator = AggregatorMachine(connect_seconds=file.aggregator.connect_seconds)
    if images:
        image = image_of(images, "aggregator")
        aggregator = replace(aggregator, isolation=CONTAINER, image=image)
    return replace(
        plan,
        file=replace(
            file,
            sites=sites,
            aggregator=aggregator,
            max_dollars=None,
            deadline_hours=None,
            start=StartSpec(),
            exchange=ExchangeSpec(),
            platforms=type(file.platforms)(),
        ),
        # No deployment's name has a dot: it is the folder of no other one.
        folder=Path(f"{place}.{form}"),
        settings=settings,
        exchange={},
        platforms={},
    )


def image_of(images: str, party: str) -> str:
    """Name of the image of a party.

    Args:
        images: ``NAME:TAG``, as of ``on_this_host``.
        party: ``site`` or ``aggregator``.
    """
    name, _, tag = images.rpartition(":")
    return f"{name}-{party}:{tag}"


def _site(site: SiteMachine, images: str) -> SiteMachine:
    machine = site.machine if site.provider == LOCAL else CloudMachine()
    if images and machine.isolation != CONTAINER:
        line = machine.line if site.line is not None else LineSpec()
        image = image_of(images, "site")
        machine = CloudMachine(isolation=CONTAINER, image=image, line=line)
    if site.provider == LOCAL:
        return replace(site, machine=machine, home=HomeSpec())
    return replace(
        site,
        provider=LOCAL,
        machine=machine,
        data=LocalDataSpec(name=site.data.name),
        compute=replace(site.compute, notices="none", gpus=0),
        home=HomeSpec(),
        sizes=(),
        dollars_per_hour=None,
        on_demand_dollars_per_hour=None,
        dollars_per_gigabyte=None,
    )


def _settings(site: SiteMachine, tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables of ``site.toml`` that a rehearsal takes over."""
    kept = {name: tables[name] for name in ("compute", "policy") if name in tables}
    if site.provider == LOCAL:
        return {**kept, **({"data": tables["data"]} if "data" in tables else {})}
    if "compute" in kept:
        kept["compute"] = {
            name: value
            for name, value in kept["compute"].items()
            if name not in _OF_MACHINES
        }
    if "name" in tables.get("data", {}):
        kept["data"] = {"name": tables["data"]["name"]}
    return kept
