"""What a run's record makes of events before anybody sees them."""

from dataclasses import replace
from pathlib import Path

from support import event_samples
from support.small_jobs import small_job

from deploy.wiring import parts as wiring
from deploy.wiring.run_record import RunRecord
from deploy.wiring.store_meters import StoreMeters
from federation.clock import SystemClock
from federation.events import Event, RoundFinished, RunStarted, SiteAnswered
from federation.ids import RunId
from monitoring.runs.run_folder import RunFolder

PRIVATE = {"unit": "record", "target_epsilon": 50.0, "clip_norm": 1.0}


def test_epsilon_of_a_run_never_falls(tmp_path: Path) -> None:
    """A lost round misses the site that has spent most; so may a new coordinator."""
    private = {"differential_privacy": PRIVATE}
    weights = {"weights": "uniform"}
    job = small_job(num_sites=2, privacy=private, aggregation=weights)
    pool, clock = wiring.build_federation(job).pool, SystemClock()
    started, *events = event_samples.private(4)
    assert isinstance(started, RunStarted)
    heard: list[Event] = []
    told = {"round": 0.0}
    for first, last in ((1, 3), (3, 4)):
        record = RunRecord(
            job,
            RunFolder(tmp_path / "run"),
            RunId(started.run_id),
            pool=pool,
            clock=clock,
            meters=StoreMeters(clock),
            introduce=lambda: (),
            listeners=[heard.append],
        )
        with record._open():
            record.emit(replace(started, first_round=first))
            for event in events:
                index = getattr(event, "round_index", 0)
                if not first <= index <= last:
                    continue
                if isinstance(event, SiteAnswered) and event.spent:
                    told["round"] = max(told["round"], event.spent.epsilon)
                if isinstance(event, RoundFinished):
                    low = {2: None, 3: 0.25}.get(index, event.epsilon)
                    event = replace(event, epsilon=low)  # noqa: PLW2901
                record.emit(event)
                if isinstance(event, RoundFinished):
                    shown = heard[-1]
                    assert isinstance(shown, RoundFinished)
                    assert shown.epsilon == told["round"] > 0.25
    found = [e.epsilon for e in heard if isinstance(e, RoundFinished)]
    assert len(found) == 5
    assert found == sorted(found, key=lambda e: e or 0.0)
