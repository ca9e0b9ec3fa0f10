"""Alerts from their causes to a person, through the loop that the monitor runs."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from support import event_samples
from support.enrolments import Federation
from support.event_samples import Script
from support.small_jobs import small_job

from deploy.aggregator_host import host_facts, monitor_process, owners, run_queue
from deploy.aggregator_host.config import AggregatorConfig, AlertSpec, LimitsSpec
from deploy.aggregator_host.owners import Owner, Usage
from deploy.aggregator_host.run_queue import Outcome
from deploy.exit_codes import FAILED, OUT_OF_BUDGET
from federation.clock import VirtualClock
from federation.event_log import EventWriter
from federation.events import Event, ModelEvaluated, RoundStarted, SiteFailed
from federation.messages import FailureKind
from monitoring.runs.run_folder import RunFolder
from monitoring.web import alerts

WITHIN_SECONDS = 10.0
JOB = small_job(num_sites=2)
SITES = tuple(site.name for site in JOB.sites)
KNOCK = (
    '{"from":"10.0.0.1","certificate":"FAILED:certificate revoked","site":"CN=clinic"}'
)
Cause = Callable[[], object]


@dataclass(kw_only=True)
class Aggregator:
    """Its folder, and what happens there."""

    config: AggregatorConfig
    clock: VirtualClock
    certificate_ends: float

    def causes(self) -> Iterator[tuple[Cause, str]]:
        """What happens, and words of the alert that is to come of it."""
        yield lambda: None, "disk has"  # Which it has not, for this reserve.
        almost = self.certificate_ends - alerts.EXPIRY_SECONDS + 1.0
        yield self._until(almost), "the certificate of site clinic ends in"
        yield self._knock, "10.0.0.1 (CN=clinic) used a revoked certificate"
        begun = self.clock.now()
        self._own(begun)
        for hours, words in (
            (1.602, "(80%). At 100 %"),
            (2.0, "(100%). Its runs wait"),
        ):
            yield self._until(begun + hours * 3600.0 / len(SITES)), words
        yield from self._rounds()
        yield from self._losses()
        yield partial(self._leave, "dead", FAILED), "run dead (small) has failed"

    def _rounds(self) -> Iterator[tuple[Cause, str]]:
        events = self._events(rounds=8)
        at = [index for index, e in enumerate(events) if isinstance(e, RoundStarted)][5]
        self._write("stalled", events[: at + 1])
        stalls = self._until(events[at].at + alerts.MIN_STALL_SECONDS)
        yield stalls, "run stalled (small): round 6 goes on for"
        missed = tuple((n, SITES[1], FailureKind.DEADLINE) for n in (3, 4, 5))
        events = self._events(rounds=8, failures=missed)
        at = [index for index, e in enumerate(events) if isinstance(e, SiteFailed)][2]
        silent = f"run silent (small): site {SITES[1]} has missed 3 rounds in a row"
        yield partial(self._write, "silent", events[: at + 1]), silent
        events = self._events(rounds=20, epsilon_cap=8.0, budget_rounds=10)
        at = [index for index, e in enumerate(events) if isinstance(e, RoundStarted)][9]
        spent = "%): that lasts for about"
        yield partial(self._write, "spent", events[:at]), spent
        yield partial(self._leave, "spent", OUT_OF_BUDGET), "the run has ended, with"

    def _losses(self) -> Iterator[tuple[Cause, str]]:
        for name, losses, words in (
            ("odd", [math.nan], "is not a finite number"),
            ("worse", [90.0] * alerts.WORSE_EVALUATIONS, "is 90."),
        ):
            events = self._events(rounds=3)
            last = next(e for e in reversed(events) if isinstance(e, ModelEvaluated))
            for loss in losses:
                sums = replace(last.pooled, loss_sum=last.pooled.count * loss)
                events.append(replace(last, pooled=sums))
            about = f"run {name} (small): the held-out loss {words}"
            yield partial(self._write, name, events), about

    def _until(self, seconds: float) -> Cause:
        return partial(self.clock.wait_until, seconds)

    def _knock(self) -> None:
        self.config.proxy.mkdir(parents=True)
        (self.config.proxy / "access.log").write_text(f"{KNOCK}\n")

    def _own(self, begun: float) -> None:
        """Begin a run whose owner may use two hours of a site."""
        made = Owner(name="ann", quota=Usage(site_hours=2.0))
        owners.change(self.config.folder, "ann", lambda _: made)
        one = run_queue.read(self._submitted("owned", owner="ann"))
        assert one is not None
        run_queue.note_start(one, 7, fruitless=0, at=begun)

    def _events(self, **script: Any) -> list[Event]:
        """Those of a run that has begun a minute ago, without the last one."""
        start = self.clock.now() - 60.0
        made = Script(sites=SITES, job_name=JOB.name, start=start, **script)
        return event_samples.run(made)[:-1]

    def _submitted(self, name: str, **about: Any) -> RunFolder:
        run = RunFolder(self.config.runs / JOB.name / name)
        if run_queue.read(run) is None:
            run_queue.submit(JOB, run, at=self.clock.now(), **about)
        return run

    def _write(self, name: str, events: list[Event]) -> None:
        with EventWriter(self._submitted(name).events) as log:
            for event in events:
                log(event)

    def _leave(self, name: str, code: int) -> None:
        run, now = self._submitted(name), self.clock.now()
        run_queue.leave_outcome(run, Outcome(code=code, message=""))
        os.utime(run.path / run_queue.OUTCOME, (now, now))


class Looks:
    """After each look something happens; then time passes until the next."""

    def __init__(self, script: Iterator[None], clock: VirtualClock) -> None:
        self.script, self.clock = script, clock

    def wait(self, seconds: float) -> bool:
        is_over = next(self.script, self) is self
        self.clock.sleep(seconds)
        return is_over


def test_each_alert_arrives_soon_after_its_cause(tmp_path: Path):
    """At the intervals at which the monitor really looks, and once."""
    federation, told, found = (
        Federation(folder=tmp_path),
        tmp_path / "told",
        list[str](),
    )
    federation.site("clinic")
    told.touch()
    command = ("/bin/sh", "-c", f"cat >> {told}")
    file = replace(
        federation.config.file,
        alerts=(AlertSpec(command=command),),
        limits=LimitsSpec(reserve_mib=1 << 30),
    )
    config, clock = replace(federation.config, file=file), federation.clock
    ends = host_facts.Host(config, clock).facts().expires["site clinic"]
    here = Aggregator(config=config, clock=clock, certificate_ends=ends)

    def script() -> Iterator[None]:
        for cause, words in here.causes():
            assert words not in told.read_text()
            cause()
            since = clock.now()
            while words not in told.read_text():
                assert clock.now() - since < WITHIN_SECONDS, words
                yield
            found.append(words)

    looks: Any = Looks(script(), clock)
    monitor_process.serve(config, looks, clock=clock, log=found.append)
    assert [told.read_text().count(words) for words in found] == [1] * 12
