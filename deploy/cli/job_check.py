"""A job's predictions and guarantees, without running it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.privacy.policy_spec import PolicySpec
from clients.privacy.site_plans import PrivateSites
from clients.training.local_federation import Federation
from deploy.wiring.rehearsal import (
    dropout_notice,
    rehearse,
    statistics_notice,
    traffic_of,
)
from federation.errors import JobError
from federation.ids import SiteId, new_run_id
from federation.job import job_file
from federation.job.spec import GOOD_SHARE, JobSpec
from federation.protocols import Clock
from federation.rounds import cost
from federation.rounds.cost import Cost, Speeds, bytes_of_sites
from federation.rounds.traffic import Span, Traffic
from monitoring import privacy_words, units
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.levels import KEPT

_MAX_SITES_WITH_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known about a job before it runs.

    Attributes:
        promises: What it promises of privacy, in lines.
        traffic: What it sends; None for sums over groups, which the sites draw, and
            with sites that run apps of Flower, whose answers are unknown here.
        cost: Seconds and dollars of the run; None without stated speeds.
        trained: Share of its time that a site trains after the first round, of the site
            where it is least; None without speeds, or for a single round.
        enough_steps: The fewest local steps for which that is ``GOOD_SHARE``; None if
            no number of them is enough, or epochs count.
        chosen: Local steps and rounds that a run comes to which chooses them itself, if
            speeds are stated.
    """

    promises: Sequence[str]
    traffic: Traffic | None
    cost: Cost | None = None
    trained: float | None = None
    enough_steps: int | None = None
    chosen: tuple[int, int] | None = None

    def lines(self) -> Iterator[str]:
        """Describe what is sent, what it costs and what is promised."""
        if self.traffic is None:
            yield "bytes cannot be predicted for groups or Flower apps"
        else:
            rounds = self.traffic.job.rounds
            for name, index in (("round 1", 1), ("round 2", 2))[:rounds]:
                yield f"{name}: {_bytes(self.traffic.of_round(index))}"
            if self.traffic.legs(SiteId(self.traffic.job.sites[0].name), rounds + 1):
                final = self.traffic.of_round(rounds + 1)
                yield f"final evaluation: {_bytes(final)}"
            yield f"whole run: {_bytes(self.traffic.of_run())}"
            sites = bytes_of_sites(self.traffic)
            for relay in self.traffic.job.relays:
                down, up = (sum(sites[name][i] for name in relay.sites) for i in (0, 1))
                yield (
                    f"relay {relay.name}: {up:,} bytes leave its cloud, {down:,} enter"
                )
        if self.cost is not None:
            parts = (
                f"{name} {price:,.4f}" for name, price in self.cost.dollars.items()
            )
            yield (
                f"at the stated speeds: {units.format_duration(self.cost.seconds)}, "
                f"{sum(self.cost.dollars.values()):,.4f} dollars ({', '.join(parts)})"
            )
        yield from self._training()
        yield from self.promises

    def _training(self) -> Iterator[str]:
        """Describe local steps, and for how much of the time sites take them."""
        if self.chosen is not None:
            steps, rounds = self.chosen
            yield f'"auto" comes to {steps} local steps a round, {rounds} rounds'
        if self.trained is not None:
            yield f"each site trains at least {self.trained:.1%} of a later round"
            if (
                self.chosen is None
                and self.enough_steps is not None
                and self.trained < GOOD_SHARE
            ):
                yield (
                    f"with training.local_steps = {self.enough_steps} it would train "
                    f"{GOOD_SHARE:.0%}"
                )

    def document(self) -> dict[str, Any]:
        """The same as data: least and most bytes, seconds, dollars by resource."""
        found: dict[str, Any] = {"privacy": self.promises}
        if self.traffic is not None:
            names = ("bytes_down", "bytes_up")
            spans = zip(names, self.traffic.of_run(), strict=True)
            found |= {name: [span.low, span.high] for name, span in spans}
        if self.cost is not None:
            found |= {"seconds": self.cost.seconds, "dollars": self.cost.dollars}
            found |= {"trained": self.trained, "enough_steps": self.enough_steps}
            if self.chosen is not None:
                found |= {"chosen_steps": self.chosen[0]}
        return found


def forecast(
    federation: Federation, clock: Clock, speeds: Path | None = None
) -> Forecast:
    """Plan privacy and secure aggregation as a run would, and size its messages.

    Args:
        federation: The job, its model and its data.
        clock: Clock of the privacy plan.
        speeds: A speeds file.

    Raises:
        JobError: The job's promises cannot be kept with these sites, data, rounds and
            batches; or the speeds file is not one for its sites.
    """
    job = federation.job
    private, contract = _promises(federation, clock)
    notices = (dropout_notice(job), bad_site_notice(job), statistics_notice(job))
    lines = [text for text in notices if text]
    if private is not None:
        planned = private.planned(at=clock.now())
        lines = [*privacy_words.lines(planned, _MAX_SITES_WITH_LINES), *lines]
        largest, usual = max(each.delta for each in planned.sites), PolicySpec()
        if private.in_sum is not None and largest > usual.max_delta:
            lines.append(
                f"a site refuses delta {largest:g} unless it raises policy.max_delta: "
                f"set privacy.differential_privacy.delta = {usual.max_delta:g}"
            )
    traffic = traffic_of(federation, contract)
    if speeds is None or traffic is None:
        return Forecast(promises=lines, traffic=traffic)
    stated = job_file.load_table(speeds, Speeds, lambda _: None)
    try:
        found = cost.of_run(traffic, stated)
    except JobError as error:
        raise JobError(error.reason, key=f"{speeds}: {error.key}") from error
    settled = cost.settled(traffic, stated)
    chosen = settled.job.training.local_steps if settled is not traffic else None
    return Forecast(
        promises=lines,
        traffic=traffic,
        cost=found,
        trained=cost.trained_share(settled, stated),
        chosen=None if chosen is None else (chosen, settled.job.rounds),
        enough_steps=cost.steps_for_share(traffic, stated, GOOD_SHARE),
    )


def sizes_of(federation: Federation, *, clock: Clock) -> Traffic | None:
    """Size a job's messages; see ``Forecast.traffic``.

    Raises:
        JobError: See ``forecast``.
    """
    return traffic_of(federation, _promises(federation, clock)[1])


def _promises(
    federation: Federation, clock: Clock
) -> tuple[PrivateSites | None, Contract | None]:
    """The sites' privacy guarantees, and the terms of secure sums."""
    job = federation.job
    # As long as the id of a run: it is part of every message.
    run_id, private = new_run_id(0.0, bytes(3)), None
    if job.privacy.differential_privacy.enabled:
        private = PrivateSites(federation, run_id=run_id, folder=None, clock=clock)
    if not job.privacy.secure_aggregation.enabled:
        return private, None
    return private, rehearse(federation, run_id, private).contract


def _bytes(spans: tuple[Span, Span]) -> str:
    down, up = (units.format_span((s.low, s.high)) for s in spans)
    return f"{down} bytes down, {up} up"


def _reach(job: JobSpec) -> str:
    """How far a bad site can move the mean of one sum, and what helps."""
    clip = job.update_clip_norm
    if job.buffer_size is not None:  # No robust rule over groups works with it.
        return f"the clip norm, {clip:g}"
    if job.privacy.secure_aggregation.levels is None:
        return (
            f"the clip norm, {clip:g}. For a robust rule see "
            "privacy.secure_aggregation.groups"
        )
    times = ""
    if job.aggregation.weights != "uniform":
        times = ", times the number of sites over the sum of their weights"
    return (
        f"{1 + KEPT:g} times the clip norm, {(1 + KEPT) * clip:g}{times}: with few "
        f"levels an honest site may add what was left out, up to {KEPT:g} clip norms"
    )


def bad_site_notice(job: JobSpec) -> str:
    """Say what limits a bad site's part in a secure sum; empty without such sums."""
    secure, rule = job.privacy.secure_aggregation, job.aggregation.combine
    if not secure.enabled:
        return ""
    if secure.groups is None:
        sums = f"one sum over {len(job.sites)} sites"
        if job.has_groups:
            sums = f"sums over {job.sites_in_sum} or more sites"
        return f"{sums}: a bad site can move the mean by up to {_reach(job)}"
    bad = job.aggregation.byzantine_sites
    sites = "site" if bad == 1 else "sites"
    return (
        f"{rule} over {secure.groups} groups of {job.sites_in_sum} or more sites, "
        f"which all sites draw together: tolerates {bad} bad {sites}, wherever they are"
    )
