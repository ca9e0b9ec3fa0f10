"""Write a new dated price table from the clouds' own lists.

    python tools/refresh_prices.py DEPLOYMENT TABLE [--prices OLD]

Machines of the old table and of the deployment are priced, on AWS and, with an API key
in CROSSFED_GOOGLE_API_KEY or a file that CROSSFED_GOOGLE_API_KEY_FILE names, on Google
Cloud; and AWS's traffic. All other rows keep their day, so that their age is visible.
"""

import argparse
import os
import sys
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aws_prices
import gcp_prices
import tomli_w
from aws_prices import AwsPrices
from gcp_prices import find_parts

from deploy.fleet import prices as price_table, spec
from deploy.fleet.machine_spec import AWS, GCP
from deploy.fleet.prices import (
    Egress,
    EgressTier,
    Keys,
    MachinePrice,
    Prices,
    Storage,
    Transfer,
)
from deploy.fleet.spec import DeploymentFile
from federation import durable_files
from federation.clock import SystemClock
from federation.errors import JobError

# A price that has changed by more is rather a slip, of theirs or of ours.
_MOST_CHANGE = 3.0
_SOURCE = "AWS Price List and spot price history"
_SOURCES = {AWS: _SOURCE, GCP: "Google Cloud Billing Catalog, sum of parts"}
_HEAD = "# Written by tools/refresh_prices.py. `--prices` takes this file.\n"

_Row = TypeVar("_Row", MachinePrice, Egress, Transfer, Storage, Keys)


class MachinePrices(Protocol):
    """A cloud that can be asked for prices: ``aws_prices``, ``gcp_prices``."""

    def on_demand(self, machine: str, region: str) -> float:
        """Dollars of an hour; an error if that is not known."""
        ...

    def spot(self, machine: str, region: str) -> float | None:
        """The same of a spot machine; None if there is none."""
        ...


def refreshed(
    old: Prices,
    file: DeploymentFile,
    aws: AwsPrices,
    gcp: MachinePrices | None = None,
    *,
    today: date,
) -> Prices:
    """Make a new table of an old one.

    Args:
        old: The table.
        file: The deployment, whose machines of these clouds are added.
        aws: AWS's prices.
        gcp: Google's; None to keep the old ones.
        today: The day of the new prices.

    Raises:
        JobError: A price has changed too much to be believed.
        ComputeError: A cloud does not have one of them, or cannot be asked.
    """
    day = today.isoformat()
    clouds: dict[str, MachinePrices] = {AWS: aws} | ({} if gcp is None else {GCP: gcp})
    wanted = {
        (row.provider, row.region, row.machine): row
        for row in old.machines
        if row.provider in clouds
        # Others are stated by a person: Google's prices of them cannot be added up.
        and (row.provider != GCP or find_parts(row.machine) is not None)
    }
    known = {(row.provider, row.region, row.machine) for row in old.machines}
    regions = sorted({region for provider, region, _ in wanted if provider == AWS})
    for site in file.sites:
        if site.provider in clouds:
            place = (site.provider, site.machine.region, site.machine.priced_as)
            if site.provider == AWS:
                regions.insert(0, place[1])  # A deployment's own first.
            if place not in known:
                wanted[place] = MachinePrice(
                    provider=place[0], region=place[1], machine=place[2], on_demand=1.0
                )
    machines = [
        _machine(row, clouds[row.provider], day, is_new=place not in known)
        for place, row in wanted.items()
    ]
    return replace(
        old,
        as_of=day,
        machines=(
            *machines,
            *(
                _kept(row, old)
                for row in old.machines
                if (row.provider, row.region, row.machine) not in wanted
            ),
        ),
        egress=tuple(
            _egress(row, aws, regions[0], day)
            if row.provider == AWS and regions
            else _kept(row, old)
            for row in old.egress
        ),
        transfer=tuple(_kept(row, old) for row in old.transfer),
        storage=tuple(_kept(row, old) for row in old.storage),
        keys=tuple(_kept(row, old) for row in old.keys),
    )


def _kept(row: _Row, old: Prices) -> _Row:
    return replace(row, as_of=row.as_of or old.as_of)


def _machine(
    row: MachinePrice, cloud: MachinePrices, day: str, *, is_new: bool
) -> MachinePrice:
    demand = cloud.on_demand(row.machine, row.region)
    spot = cloud.spot(row.machine, row.region)
    what = f"{row.machine} in {row.region}"
    if not is_new:
        _check_change(f"an hour of {what}", row.on_demand, demand)
    source = _SOURCES[row.provider]
    if spot is not None and spot > demand:
        spot = None  # No one who has a choice would pay it.
    return replace(row, on_demand=demand, spot=spot, source=source, as_of=day)


def _egress(row: Egress, aws: AwsPrices, region: str, day: str) -> Egress:
    tiers = [
        EgressTier(up_to=tier.up_to, dollars=tier.dollars)
        for tier in aws.egress(region)
    ]
    # What is free in every account is in no list.
    free = [tier for tier in row.tiers if tier.dollars == 0]
    paid = [tier for tier in row.tiers if tier.dollars > 0]
    _check_change(f"traffic from {region}", paid[0].dollars, tiers[0].dollars)
    source = f"{_SOURCE}, {region}"
    return replace(row, tiers=(*free, *tiers), source=source, as_of=day)


def _check_change(what: str, old: float, new: float) -> None:
    if not old / _MOST_CHANGE <= new <= old * _MOST_CHANGE:
        raise JobError(
            f"{what} was {old} dollars and is {new}: compare it with the cloud's own "
            "page, and if it is right, state it in your table",
        )


def write(prices: Prices, path: Path) -> None:
    """Write a price table.

    Raises:
        StoreUnavailable: The file cannot be written.
    """
    text = _HEAD + tomli_w.dumps(_without_none(asdict(prices)))
    durable_files.replace_file(path, [text.encode()])


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(each) for each in value]
    return value


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("deployment", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--prices", type=Path)
    given = parser.parse_args()
    today = price_table.day_of(SystemClock().now())
    plan = spec.load(given.deployment)
    old = price_table.load(
        given.prices or plan.prices, today=today, warn=lambda _: None
    )
    secret = gcp_prices.key_of(os.environ)
    google = None if secret is None else gcp_prices.GcpPrices(secret)
    found = refreshed(old, plan.file, aws_prices.connect(), google, today=today)
    write(found, given.table)
    if google is None:
        print(
            "only AWS was asked for prices: those of other clouds keep their day. Set "
            f"{gcp_prices.KEY} or {gcp_prices.KEY_FILE} to ask Google",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
