"""Synthetic runs: the events that a coordinator would emit, without training."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from federation.events import (
    CheckpointSaved,
    CheckpointSkipped,
    DataDistributed,
    Event,
    ModelEvaluated,
    PrivacyPlanned,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    SiteAnswered,
    SiteFailed,
    SitePrivacy,
    SiteShare,
    StepTaken,
    Warned,
)
from federation.messages import FailureKind, MetricSums, Phase, PrivacySpent
from privacy.dp.accountant import (
    NEIGHBOURING_RELATION,
    NO_SAMPLING,
    SAMPLING_ASSUMPTION,
    SITE_RELATION,
)

START = 1_790_000_000.0
UPDATE_BYTES = 150_600
STEP_DOWN_BYTES, STEP_UP_BYTES = 900, 400
TWO_SITES = ("aws-us-east-1", "gcp-us-central1")
EPSILON_CAP, DELTA, HELD_OUT_NOISE = 8.0, 1e-4, 3.2
_IN_SUM = "the aggregator and the public together with one of the sites"
HOLDS_AGAINST = {
    "record": "the aggregator, all other sites and the public",
    "joint": _IN_SUM,
    "site": _IN_SUM,
}
CLOUDS = ("aws", "gcp", "azure", "on-prem")


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens in a synthetic run.

    Attributes:
        sites: Their names.
        rounds: Rounds of the job.
        stop_after: Last round that runs; all by default.
        first_round: Where this coordinator begins; above 1 it has resumed.
        task: Task of the job.
        failures: Round and site to kind.
        lost: Rounds without quorum.
        message: What a failed site says.
        warning: A warning of the first round.
        secure: Whether the aggregator sees sums only.
        epsilon_cap: What each site may spend; None without privacy.
        public: Whether held-out results leave without noise, though there is privacy.
        budget_rounds: Rounds that the sites' budgets allow; all of them by default.
        replaced: Layers that privacy replaced.
        unit: Unit of privacy.
        adapts: Whether the clip norm of updates follows them.
        seed: Of the noise.
        start: Seconds since the epoch.
    """

    sites: tuple[str, ...] = TWO_SITES
    rounds: int = 10
    stop_after: int | None = None
    first_round: int = 1
    task: str = "classification"
    failures: tuple[tuple[int, str, FailureKind], ...] = ()
    lost: tuple[int, ...] = ()
    message: str = "the site's process ended with signal 9"
    warning: str = ""
    job_name: str = "two-clouds-quickstart"
    labels: tuple[str, ...] = tuple(str(digit) for digit in range(10))
    secure: bool = False
    epsilon_cap: float | None = None
    public: bool = False
    budget_rounds: int | None = None
    replaced: tuple[str, ...] = ()
    unit: str = "record"
    adapts: bool = False
    seed: int = 7
    start: float = START


def run(script: Script) -> list[Event]:
    """All events of one coordinator."""
    return list(_Play(script).events())


def two_sites(rounds: int = 10) -> list[Event]:
    """A quiet run on two sites."""
    return run(Script(rounds=rounds))


def troubled() -> list[Event]:
    """A run with failures of several kinds, a lost round and a warning."""
    aws, gcp = TWO_SITES
    return run(
        Script(
            failures=(
                (3, gcp, FailureKind.DEADLINE),
                (5, aws, FailureKind.CRASHED),
                (5, gcp, FailureKind.UNREACHABLE),
                (8, gcp, FailureKind.NOT_FINITE),
            ),
            lost=(5,),
            warning="class 7 is held by one site only",
        )
    )


def resumed() -> list[Event]:
    """A coordinator killed within round 5, and one that continues from round 4."""
    killed = [
        event
        for event in run(Script(stop_after=5, seed=1))
        if not isinstance(event, RunFinished)
        and not (isinstance(event, RoundFinished) and event.round_index == 5)
    ]
    at = killed[-1].at + 60
    skipped = CheckpointSkipped(
        at=at, key="round-000004.json", reason="the blob's digest is wrong"
    )
    return [*killed, skipped, *run(Script(first_round=4, start=at, seed=2))]


def language(rounds: int = 10) -> list[Event]:
    """A run of a small language model, shared out by group."""
    labels = ("json", "http", "email", "asyncio")
    return run(Script(rounds=rounds, task="causal_lm", labels=labels))


def secure(rounds: int = 4) -> list[Event]:
    """Secure aggregation on three sites, of which one drops out of round 2."""
    sites = (*TWO_SITES, "on-premises")
    failures = ((2, sites[2], FailureKind.UNREACHABLE),)
    return run(Script(sites=sites, rounds=rounds, failures=failures, secure=True))


def private(rounds: int = 10, **changes: Any) -> list[Event]:
    """Differential privacy on two sites, with noise on held-out results."""
    script = Script(
        rounds=rounds,
        job_name="two-clouds-private",
        epsilon_cap=EPSILON_CAP,
        replaced=("bn1: BatchNorm2d by GroupNorm",),
    )
    return run(replace(script, **changes))


def exhausted() -> list[Event]:
    """Budgets that allow six rounds of ten."""
    return private(budget_rounds=6)


def private_and_secure(rounds: int = 4) -> list[Event]:
    """Differential privacy and secure aggregation on three sites."""
    return private(rounds, sites=(*TWO_SITES, "on-premises"), secure=True)


def joint(rounds: int = 4) -> list[Event]:
    """Noise of three sites that adds up in the secure sum."""
    sites = (*TWO_SITES, "on-premises")
    return private(rounds, sites=sites, secure=True, unit="joint")


def whole_sites(rounds: int = 4, num_sites: int = 16) -> list[Event]:
    """Privacy of whole sites, with a clip norm that follows their updates."""
    sites = tuple(f"clinic-{index + 1:02d}" for index in range(num_sites))
    return private(
        rounds,
        sites=sites,
        secure=True,
        public=True,
        unit="site",
        adapts=True,
        replaced=(),
    )


def many_sites(num_sites: int = 200, rounds: int = 5) -> list[Event]:
    """A run on many sites, some of which fail."""
    sites = tuple(f"site-{index:04d}" for index in range(num_sites))
    failures = tuple(
        (index % rounds + 1, sites[index], FailureKind.DEADLINE)
        for index in range(0, num_sites, 17)
    )
    return run(Script(sites=sites, rounds=rounds, failures=failures))


class _Play:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._random = random.Random(script.seed)  # noqa: S311
        self._at = script.start
        self._skew = {site: self._random.uniform(-0.08, 0.2) for site in script.sites}

    def events(self) -> Iterator[Event]:
        script = self._script
        yield self._run_started()
        yield self._data()
        if script.epsilon_cap is not None:
            yield self._privacy_planned(script.epsilon_cap)
        if script.warning:
            yield Warned(at=self._at, message=script.warning)
        last = script.stop_after or script.budget_rounds or script.rounds
        for index in range(script.first_round, last + 1):
            yield from self._round(index)
        if script.budget_rounds:
            yield from self._round_beyond_budget(last + 1)
        if last == script.rounds or script.budget_rounds:
            yield from self._steps(last + 1, script.sites, "survivors", "reveal")
            yield self._evaluated(last, script.sites, alone=True)
        yield RunFinished(
            at=self._at,
            status=self._status(last),
            rounds_completed=last - len(script.lost),
            last_round=last,
            message=_MESSAGES[self._status(last)].format(last + 1),
            seconds=self._at - script.start,
        )

    def _status(self, last: int) -> str:
        if self._script.budget_rounds:
            return "exhausted"
        return "completed" if last == self._script.rounds else "stopped"

    def _privacy_planned(self, cap: float) -> PrivacyPlanned:
        script = self._script
        is_site = script.unit == "site"
        return PrivacyPlanned(
            at=self._at,
            unit=script.unit,
            relation=SITE_RELATION if is_site else NEIGHBOURING_RELATION,
            accountant="pld",
            sampling=NO_SAMPLING if is_site else SAMPLING_ASSUMPTION,
            holds_against=HOLDS_AGAINST[script.unit],
            signal_to_noise=1.394 if is_site else None,
            sites=tuple(
                SitePrivacy(
                    site=site,
                    epsilon_cap=cap,
                    delta=DELTA,
                    noise_multiplier=0.9 + 0.05 * number * (script.unit == "record"),
                    sampling_rate=1.0 if is_site else 0.05,
                    steps_per_round=20 if script.unit == "record" else 1,
                    held_out_noise=None if script.public else HELD_OUT_NOISE,
                )
                for number, site in enumerate(script.sites)
            ),
            replaced=script.replaced,
            withheld=(
                "training losses never leave a site",
                "held-out results leave with noise, charged only to these records",
            ),
        )

    def _spent(self, index: int, site: str) -> PrivacySpent | None:
        """What a site has spent once it has answered in a round."""
        script = self._script
        if script.epsilon_cap is None:
            return None
        rounds = script.budget_rounds or script.rounds
        share = 0.99 - 0.02 * script.sites.index(site) * (script.unit != "site")
        # One more release of held-out results than there are rounds.
        held_out = script.epsilon_cap * math.sqrt(index / (rounds + 2))
        return PrivacySpent(
            epsilon=script.epsilon_cap * share * math.sqrt(min(1, index / rounds)),
            delta=DELTA,
            held_out_epsilon=None if script.public else held_out,
        )

    def _round_beyond_budget(self, index: int) -> Iterator[Event]:
        """A round for which no site has anything left."""
        script, began = self._script, self._at
        yield RoundStarted(at=began, round_index=index, cohort=script.sites)
        for site in script.sites:
            yield SiteFailed(
                at=self._at + 0.1,
                round_index=index,
                site=site,
                kind=FailureKind.BUDGET,
                message="this round would bring epsilon to 8.41, beyond 8",
                asked_seconds=0.01,
                answered_seconds=0.1,
                bytes_down=UPDATE_BYTES,
                bytes_up=0,
            )
        self._at += 0.1
        yield RoundFinished(
            at=self._at,
            round_index=index,
            status="lost",
            asked=script.sites,
            answered=(),
            failed=(("budget", len(script.sites)),),
            bytes_down=UPDATE_BYTES * len(script.sites),
            bytes_up=0,
            seconds=0.1,
            phases=(),
            training=None,
            update_norm=None,
        )

    def _run_started(self) -> RunStarted:
        script = self._script
        return RunStarted(
            at=self._at,
            run_id="20260921-141320-c0ffee",
            job_name=script.job_name,
            rounds=script.rounds,
            first_round=script.first_round,
            sites=script.sites,
            parameters=UPDATE_BYTES // 4,
            engine="inproc",
            task=script.task,
            secure_aggregation=script.secure,
        )

    def _data(self) -> DataDistributed:
        labels = self._script.labels
        shares = []
        for number, site in enumerate(self._script.sites):
            counts = tuple(self._random.randint(0, 120) for _ in labels)
            share = SiteShare(
                site=site,
                cloud=CLOUDS[number % len(CLOUDS)],
                region="region-1",
                train_examples=sum(counts),
                held_out_examples=sum(counts) // 5,
                counts=counts,
            )
            shares.append(share)
        kind = "group" if self._script.task == "causal_lm" else "class"
        return DataDistributed(
            at=self._at, label_kind=kind, labels=labels, shares=tuple(shares)
        )

    def _round(self, index: int) -> Iterator[Event]:
        script, began = self._script, self._at
        yield RoundStarted(at=began, round_index=index, cohort=script.sites)
        steps: list[StepTaken] = []
        if index == script.first_round:
            steps += self._steps(index, script.sites, "advertise", "confirm")
            yield from steps
        failed = {s: kind for r, s, kind in script.failures if r == index}
        reports = [self._report(index, site, failed.get(site)) for site in script.sites]
        reports.sort(key=lambda report: report.answered_seconds)
        for report in reports:
            self._at = began + report.answered_seconds
            yield report
        answered = tuple(r.site for r in reports if isinstance(r, SiteAnswered))
        ending = self._steps(index, answered, "survivors", "reveal")
        yield from ending
        yield self._evaluated(index - 1, answered if script.secure else script.sites)
        self._at += 0.05
        yield self._round_finished(index, began, reports, [*steps, *ending])
        yield CheckpointSaved(
            at=self._at, round_index=index, bytes_written=UPDATE_BYTES, seconds=0.01
        )

    def _steps(
        self, index: int, sites: tuple[str, ...], *names: str
    ) -> list[StepTaken]:
        """Steps of secure aggregation, if the run has it."""
        return [
            StepTaken(
                at=self._at,
                round_index=index,
                step=name,
                sites=sites,
                bytes_down=(STEP_DOWN_BYTES,) * len(sites),
                bytes_up=(STEP_UP_BYTES,) * len(sites),
            )
            for name in names
            if self._script.secure
        ]

    def _report(
        self, index: int, site: str, kind: FailureKind | None
    ) -> SiteAnswered | SiteFailed:
        seconds = 0.6 + self._skew[site] + self._random.uniform(0, 0.1)
        if kind is not None:
            return SiteFailed(
                at=self._at + seconds,
                round_index=index,
                site=site,
                kind=kind,
                message=self._script.message,
                asked_seconds=0.01,
                answered_seconds=seconds,
                bytes_down=UPDATE_BYTES,
                bytes_up=0,
            )
        answer = SiteAnswered(
            at=self._at + seconds,
            round_index=index,
            site=site,
            asked_seconds=0.01,
            answered_seconds=seconds,
            bytes_down=UPDATE_BYTES,
            bytes_up=UPDATE_BYTES,
            num_examples=640,
            num_steps=20,
            weight=640.0,
            training=self._sums(index, site, 640),
            evaluation=self._sums(index - 1, site, 160),
            phases=(
                Phase(name="evaluate", start_seconds=0.0, seconds=0.12),
                Phase(name="train", start_seconds=0.12, seconds=seconds - 0.25),
                Phase(name="prepare", start_seconds=seconds - 0.13, seconds=0.05),
            ),
        )
        if self._script.epsilon_cap is not None:
            answer = replace(
                answer, num_examples=None, training=None, spent=self._spent(index, site)
            )
        return _masked(answer) if self._script.secure else answer

    def _round_finished(
        self,
        index: int,
        began: float,
        reports: list[SiteAnswered | SiteFailed],
        steps: list[StepTaken],
    ) -> RoundFinished:
        answers = [r for r in reports if isinstance(r, SiteAnswered)]
        kinds: dict[str, int] = {}
        for report in reports:
            if isinstance(report, SiteFailed):
                kinds[report.kind.value] = kinds.get(report.kind.value, 0) + 1
        lost = index in self._script.lost
        waited = max(report.answered_seconds for report in reports)
        training = [self._sums(index, answer.site, 640) for answer in answers]
        if self._script.epsilon_cap is not None:
            training = []
        spent = [answer.spent for answer in answers]
        return RoundFinished(
            at=self._at,
            round_index=index,
            status="lost" if lost else "completed",
            asked=self._script.sites,
            answered=tuple(answer.site for answer in answers),
            failed=tuple(sorted(kinds.items())),
            bytes_down=sum(report.bytes_down for report in reports)
            + sum(sum(step.bytes_down) for step in steps),
            bytes_up=sum(report.bytes_up for report in reports)
            + sum(sum(step.bytes_up) for step in steps),
            seconds=self._at - began,
            phases=(
                Phase(name="exchange", start_seconds=0.0, seconds=waited),
                Phase(name="combine", start_seconds=waited, seconds=0.01),
                Phase(name="apply", start_seconds=waited + 0.01, seconds=0.01),
                Phase(name="checkpoint", start_seconds=waited + 0.02, seconds=0.03),
            ),
            training=sum(training[1:], training[0]) if training else None,
            update_norm=None if lost else 2.0 / index,
            update_clip=0.5 * 0.9**index if self._script.adapts else None,
            epsilon=max((told.epsilon for told in spent if told), default=None),
        )

    def _evaluated(
        self, index: int, sites: tuple[str, ...], *, alone: bool = False
    ) -> ModelEvaluated:
        by_site = [self._sums(index, site, 160) for site in sites]
        spent = [self._spent(index + 1, site) for site in sites]
        return ModelEvaluated(
            at=self._at,
            round_index=index,
            pooled=sum(by_site[1:], by_site[0]),
            sites=sites,
            by_site=() if self._script.secure else tuple(by_site),
            bytes_down=(UPDATE_BYTES if alone else 0,) * len(sites),
            bytes_up=(200 if alone else 0,) * len(sites),
            spent=tuple(told for told in spent if told) if alone else (),
        )

    def _sums(self, index: int, site: str, count: int) -> MetricSums:
        fall = math.exp(-index / 3)
        loss = 0.2 + 2.1 * fall + self._skew[site] * (1 + fall)
        right = min(0.99, 0.97 - 0.87 * fall - self._skew[site] / 2)
        return MetricSums(
            count=count,
            loss_sum=count * loss,
            metrics={"correct": int(count * max(0.05, right))},
        )


_MESSAGES = {
    "completed": "",
    "stopped": "stopped by SIGINT",
    "exhausted": "round {} is beyond the privacy budget of aws-us-east-1: this round "
    "would bring epsilon to 8.41, beyond 8 (and 1 more)",
}


def _masked(answer: SiteAnswered) -> SiteAnswered:
    """What is left of an answer under secure aggregation."""
    return replace(
        answer,
        num_examples=None,
        num_steps=None,
        weight=None,
        training=None,
        evaluation=None,
        phases=(),
    )
