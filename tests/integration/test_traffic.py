"""Bytes predicted before a run, compared with the bytes that its grid counts."""

from pathlib import Path
from typing import Any

import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli import job_check
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.event_log import read_events
from federation.events import ModelEvaluated, RoundFinished, StepTaken
from federation.job.spec import JobSpec
from federation.rounds.traffic import Span, Traffic

pytestmark = pytest.mark.slow

P1 = {"enabled": True}
P2 = {"enabled": True, "threshold": 4}
PRIVATE = {"unit": "record", "target_epsilon": 50.0, "clip_norm": 1.0}


def job_of(secure: dict[str, Any] | None = None, **tables: Any) -> JobSpec:
    """Five sites and three rounds."""
    if secure is not None:
        tables["privacy"] = {"secure_aggregation": secure}
    return small_job(num_sites=5, rounds=3, **tables)


def traffic_of(job: JobSpec) -> Traffic:
    """What is predicted of a job."""
    traffic = job_check.forecast(wiring.build_federation(job), VirtualClock()).traffic
    assert traffic is not None
    return traffic


def counted(job: JobSpec, folder: Path) -> list[tuple[int, int]]:
    """Bytes down and up of each round of a run, and of its final evaluation."""
    simulate(job, folder=folder)
    events = read_events(folder / "events.jsonl")
    rounds = [
        (e.bytes_down, e.bytes_up) for e in events if isinstance(e, RoundFinished)
    ]
    alone = [
        e
        for e in events
        if isinstance(e, ModelEvaluated | StepTaken) and e.round_index >= job.rounds
    ]
    last = [
        (sum(e.bytes_down), sum(e.bytes_up))
        for e in alone
        if isinstance(e, ModelEvaluated) or e.round_index > job.rounds
    ]
    if last:
        rounds.append((sum(down for down, _ in last), sum(up for _, up in last)))
    return rounds


@pytest.mark.parametrize(
    "job",
    [
        job_of(P1),
        job_of({**P1, "hybrid": False, "ring_bits": 24}),
        job_of(P2),
        job_of(P2, evaluation={"every": 0}),
        job_of(P2, evaluation={"every": 2}),
        job_of(P2, communication={"down_codec": {"name": "bf16"}}),
        job_of({**P1, "levels": 4}),
        job_of({**P2, "levels": 256}, communication={"down_content": "sum"}),
        job_of(
            {**P1, "levels": 3},
            communication={"down_content": "sum"},
            aggregation={"server_optimizer": {"name": "adam"}},
            evaluation={"every": 2},
        ),
    ],
    ids=[
        *("p1", "p1 without hybrid", "p2", "p2, no evaluation", "p2, every other"),
        *("p2, bf16 down", "p1, 4 levels", "p2, sums of 256", "p1, sums of 3, adam"),
    ],
)
def test_secure_rounds_send_what_was_predicted(job: JobSpec, tmp_path: Path) -> None:
    """To the byte: every message has a fixed length."""
    traffic = traffic_of(job)
    found = counted(job, tmp_path / "run")
    assert len(found) == job.rounds + (job.evaluation.every > 0)
    for index, (down, up) in enumerate(found, start=1):
        assert traffic.of_round(index) == (Span(down, down), Span(up, up)), index
    down, up = traffic.of_run()
    assert (down.low, up.low) == tuple(map(sum, zip(*found, strict=True)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "job",
    [
        job_of(),
        job_of(evaluation={"every": 0}),
        job_of(aggregation={"weights": "dynamic"}),
        job_of(
            model={"factory": "support.users_module:frozen_network"},
            evaluation={"every": 2},
        ),
        job_of(
            privacy={"differential_privacy": PRIVATE},
            aggregation={"weights": "uniform"},
            training={"local_steps": 1, "batch_size": 4, "optimizer": {"lr": 0.5}},
            evaluation={"every": 0},
        ),
        small_job(num_sites=5, rounds=12, schedule={"sites_per_round": 3}),
        small_job(
            num_sites=3,
            rounds=3,
            model={
                "factory": "clients.models:logistic_regression",
                "options": {"inputs": 4, "classes": 1},
            },
            data={"source": "support.small_jobs:first_or_not"},
            training={
                "task": "binary",
                "measures": ["auc", "calibration"],
                "local_epochs": 1,
                "optimizer": {"lr": 0.5},
            },
        ),
        job_of(communication={"codec": {"name": "bf16"}}),
        job_of(communication={"down_codec": {"name": "fp16"}}),
        job_of(
            communication={"down_codec": {"name": "bf16"}, "down_content": "change"}
        ),
        job_of(
            model={"factory": "support.users_module:norm_network"},
            communication={
                "codec": {"name": "int4"},
                "down_codec": {"name": "int4"},
                "down_content": "change",
            },
        ),
    ],
    ids=[
        *("plain", "no evaluation", "dynamic", "frozen", "private", "sampled"),
        *(
            "measures",
            "bf16 up",
            "fp16 down",
            "changes down",
            "running statistics in int4",
        ),
    ],
)
def test_rounds_in_the_clear_send_what_was_predicted(
    job: JobSpec, tmp_path: Path
) -> None:
    """Down to the byte; up but for the length of a site's own numbers."""
    traffic = traffic_of(job)
    found = counted(job, tmp_path / "run")
    assert len(found) == job.rounds + (job.evaluation.every > 0)
    for index, (down, up) in enumerate(found, start=1):
        spans = traffic.of_round(index)
        for span, actual in zip(spans, (down, up), strict=True):
            assert span.low <= actual <= span.high, index
            # At most one step of the header's padding for each message, and the texts
            # of calibration's bins, of which many hold nothing.
            step = 64 + 320 * bool(job.training.measures)
            assert span.high - span.low <= step * (job.cohort_size + 2)
        if not job.privacy.differential_privacy.enabled and job.cohort_size == 5:
            assert spans[0] == Span(down, down)
