"""A deployment of clouds on this host: the same file, without machines that cost.

Pure: a plan in, a plan out. Keys, runs and ledgers of a rehearsal are in a folder of
its own, so nothing of it is mistaken for that of the sites themselves; and it neither
reads what only a site's own machine may, nor writes where that does.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.fleet.deployment_file import DeploymentPlan
from deploy.fleet.tables.aggregator_machine import AggregatorMachine
from deploy.fleet.tables.providers import LOCAL
from deploy.fleet.tables.site_machine import CloudMachine, SiteMachine
from deploy.fleet.tables.start_spec import StartSpec
from deploy.site_host.config import LocalDataSpec
from deploy.site_host.home_spec import HomeSpec
from deploy.wiring.exchange import ExchangeSpec

# What of a cloud's machine is not on this host.
_OF_MACHINES = ("notices", "gpus")


def on_this_host(plan: DeploymentPlan) -> DeploymentPlan:
    """Have a deployment run on this host, whatever its sites' providers are.

    Sites that the file has on this host keep their form and their data. Others have the
    part of the job's dataset that a simulation gives them.
    """
    file = plan.file
    settings = {
        site.name: _settings(site, plan.settings[site.name]) for site in file.sites
    }
    return replace(
        plan,
        file=replace(
            file,
            sites=tuple(map(_site, file.sites)),
            aggregator=AggregatorMachine(
                connect_seconds=file.aggregator.connect_seconds
            ),
            max_dollars=None,
            deadline_hours=None,
            start=StartSpec(),
            exchange=ExchangeSpec(),
            platforms=type(file.platforms)(),
        ),
        # No deployment's name has a dot: it is the folder of no other one.
        folder=Path(f"{plan.folder}.local"),
        settings=settings,
        exchange={},
        platforms={},
    )


def _site(site: SiteMachine) -> SiteMachine:
    if site.provider == LOCAL:
        return replace(site, home=HomeSpec())
    return replace(
        site,
        provider=LOCAL,
        machine=CloudMachine(),
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
