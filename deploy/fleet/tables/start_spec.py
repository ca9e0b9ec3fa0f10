"""The table ``[start]`` of the deployment file: when machines may be started."""

from collections.abc import Sequence
from dataclasses import dataclass

from cloud_adapters.compute.pool import Market
from deploy.fleet.choosing import start_window
from deploy.fleet.tables.providers import CLOUDS
from deploy.fleet.tables.site_machine import SiteMachine
from federation.errors import JobError
from federation.job.job_keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec:
    """When machines may be started. Those that run, and replacements, do not wait.

    Attributes:
        window: Hours of every day in the time of a place, for example `22:00-06:00
            Europe/Berlin`; by default, at any time.
        max_spot_dollars_per_hour: What an hour of each spot machine of a cloud may cost
            when machines are started: the highest of its zones now on AWS; on Google
            Cloud, which publishes no such prices, that of the price table. None for
            any price.
        at_latest_hours: After so many hours of waiting, prices no longer count, and the
            window alone does. The hours count from the first `crossfed up` that waits
            to the first that starts machines, or to `crossfed down`. None to wait for
            as long as it takes.
        machine_minutes: How long a machine takes from its request until its site
            works: installation and takeover. `crossfed up --keep` counts it for each
            move before a deadline and for each change of size.
    """

    window: str = ""
    max_spot_dollars_per_hour: float | None = key(default=None, above=0.0)
    at_latest_hours: float | None = key(default=None, above=0.0)
    machine_minutes: float = key(default=15.0, above=0.0, high=600.0)


def check(start: StartSpec, sites: Sequence[SiteMachine]) -> None:
    """Refuse conditions of a start that could hold back nothing.

    Args:
        start: The table.
        sites: Sites of the file.

    Raises:
        JobError: A key is missing, wrong or without effect.
    """
    start_window.parse(start.window, key="start.window")
    clouds = [site for site in sites if site.provider in CLOUDS]
    spots = [site for site in clouds if site.machine.market == Market.SPOT.value]
    has_price = start.max_spot_dollars_per_hour is not None
    for name, is_wrong, why in (
        (
            "max_spot_dollars_per_hour",
            has_price and not spots,
            "is for spot machines of clouds, and no site has one",
        ),
        (
            "at_latest_hours",
            start.at_latest_hours is not None and not has_price,
            "has no effect without a ceiling: the window always counts",
        ),
    ):
        if is_wrong:
            raise JobError(why, key=f"start.{name}")
