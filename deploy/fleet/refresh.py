"""``crossfed plan --refresh-prices``: a new dated price table from a cloud's own lists.

Asked for are AWS's machines of the table and of the deployment, and its traffic.
Everything else is kept with the day that it is of, so that its age is still seen.
"""

from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from deploy.fleet.deployment_file import AWS, DeploymentFile
from deploy.fleet.prices import (
    Egress,
    EgressTier,
    Keys,
    MachinePrice,
    Prices,
    Storage,
    Transfer,
)
from federation import durable_files
from federation.errors import JobError

if TYPE_CHECKING:
    from cloud_adapters.compute.aws_prices import AwsPrices

# A price that has changed by more is rather a slip, of theirs or of ours.
_MOST_CHANGE = 3.0
_SOURCE = "AWS Price List and spot price history"
_HEAD = "# Written by crossfed plan --refresh-prices. `--prices` takes this file.\n"

_Row = TypeVar("_Row", MachinePrice, Egress, Transfer, Storage, Keys)


def refreshed(
    old: Prices, file: DeploymentFile, aws: "AwsPrices", *, today: date
) -> Prices:
    """Make a new table of an old one.

    Args:
        old: The table.
        file: The deployment, whose machines of AWS are added.
        aws: AWS's prices.
        today: The day of the new prices.

    Raises:
        JobError: A price has changed too much to be believed.
        ComputeError: AWS does not have one of them, or cannot be asked.
    """
    day = today.isoformat()
    wanted = {
        (row.region, row.machine): row for row in old.machines if row.provider == AWS
    }
    regions = sorted({region for region, _ in wanted})
    for site in file.sites:
        if site.provider == AWS:
            place = (site.machine.region, site.machine.type)
            regions.insert(0, place[0])  # A deployment's own first.
            wanted.setdefault(
                place,
                MachinePrice(
                    provider=AWS, region=place[0], machine=place[1], on_demand=1.0
                ),
            )
    known = {(row.region, row.machine) for row in old.machines if row.provider == AWS}
    machines = [
        _machine(row, aws, day, is_new=place not in known)
        for place, row in wanted.items()
    ]
    return replace(
        old,
        as_of=day,
        machines=(
            *machines,
            *(_kept(row, old) for row in old.machines if row.provider != AWS),
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
    row: MachinePrice, aws: "AwsPrices", day: str, *, is_new: bool
) -> MachinePrice:
    demand = aws.on_demand(row.machine, row.region)
    spot = aws.spot(row.machine, row.region)
    what = f"{row.machine} in {row.region}"
    if not is_new:
        _check_change(f"an hour of {what}", row.on_demand, demand)
    if spot is not None and spot > demand:
        spot = None  # No one who has a choice would pay it.
    return replace(row, on_demand=demand, spot=spot, source=_SOURCE, as_of=day)


def _egress(row: Egress, aws: "AwsPrices", region: str, day: str) -> Egress:
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
            key="--refresh-prices",
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
