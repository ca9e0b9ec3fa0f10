"""Runs whose model and updates travel in 16 bits."""

from typing import Any

import numpy as np
import pytest
from support.small_jobs import small_job
from support.without_report import simulate

from deploy.cli import job_check
from deploy.wiring import parts as wiring
from federation.clock import VirtualClock
from federation.errors import JobError, QuorumNotMet
from federation.events import (
    Event,
    ModelEvaluated,
    RoundFinished,
    SiteAnswered,
    SiteFailed,
)
from federation.job.spec import JobSpec
from federation.rounds.traffic import Span
from monitoring.runs.run_result import RunResult

pytestmark = pytest.mark.slow

# Enough values that headers are a small part of a message.
WIDE = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [512, 64]},
}
ROUNDS = 6


def wide_job(up: str = "identity", down: str = "identity", **tables: Any) -> JobSpec:
    """Four sites that train some 35,000 values."""
    training = {"local_steps": 4, "batch_size": 8, "optimizer": {"lr": 0.1}}
    communication = {"codec": {"name": up}, "down_codec": {"name": down}}
    given: dict[str, Any] = {
        "rounds": ROUNDS,
        "training": training,
        "communication": communication,
    }
    return small_job(num_sites=4, model=WIDE, **(given | tables))


def run(
    job: JobSpec, engine: str = "inproc", **more: Any
) -> tuple[RunResult, list[Event]]:
    """Its outcome and all that happened."""
    seen: list[Event] = []
    return simulate(job, engine=engine, listeners=[seen.append], **more), seen


def loss(events: list[Event]) -> float:
    """Of the final model."""
    (last,) = [
        e for e in events if isinstance(e, ModelEvaluated) and e.round_index == ROUNDS
    ]
    return last.pooled.loss


def sent(events: list[Event]) -> tuple[int, int]:
    """Bytes of all training rounds, down and up."""
    rounds = [e for e in events if isinstance(e, RoundFinished)]
    assert [e.status for e in rounds] == ["completed"] * ROUNDS
    return sum(e.bytes_down for e in rounds), sum(e.bytes_up for e in rounds)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_the_bytes_bring_the_same_loss(name: str):
    """Down and up, as predicted before the run."""
    job = wide_job(name, name)
    (_, whole), (_, half) = run(wide_job()), run(job)
    assert loss(half) == pytest.approx(loss(whole), abs=0.005)
    assert loss(half) != loss(whole)
    for few, many in zip(sent(half), sent(whole), strict=True):
        assert 0.5 * many < few < 0.51 * many
    traffic = job_check.forecast(wiring.build_federation(job), VirtualClock()).traffic
    assert traffic is not None
    rounds = [traffic.of_round(index) for index in range(1, ROUNDS + 1)]
    for way, found in enumerate(sent(half)):
        low = sum(spans[way].low for spans in rounds)
        high = sum(spans[way].high for spans in rounds)
        assert low <= found <= high
        assert high - low <= 64 * 4 * ROUNDS


def test_engines_agree_bit_for_bit():
    """Encoding happens at the same two places; for Flower's, see its own tests."""
    machines = [{"site": f"site-{i}", "examples_per_second": 9.0} for i in range(4)]
    job = wide_job("bf16", "fp16", simulation={"machines": machines})
    ours, theirs = run(job)[0].weights, run(job, "virtual")[0].weights
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_model_goes_down_in_16_bits_under_secure_aggregation():
    """Sites sign for the words that they were sent; the sum is as without the codec."""
    privacy = {"secure_aggregation": {"enabled": True}}
    job = wide_job(down="bf16", privacy=privacy)
    (_, whole), (_, half) = run(wide_job(privacy=privacy)), run(job)
    assert loss(half) == pytest.approx(loss(whole), abs=0.005)
    (few, up), (many, same) = sent(half), sent(whole)
    assert few < 0.6 * many
    assert up == same


def test_a_model_beyond_fp16_ends_the_run_with_the_reason():
    """Its rounds are discarded: no site is ever sent an infinite weight."""
    server = {"name": "average", "lr": 1e9}
    job = wide_job(down="fp16", aggregation={"server_optimizer": server})
    seen: list[Event] = []
    with pytest.raises(QuorumNotMet, match="does not fit into fp16"):
        simulate(job, listeners=[seen.append])
    rounds = [e for e in seen if isinstance(e, RoundFinished)]
    assert [e.status for e in rounds] == ["discarded"] * 3


def changes_job(codec: str = "bf16", **tables: Any) -> JobSpec:
    """A job whose sites are sent what changed."""
    communication = {"down_codec": {"name": codec}, "down_content": "change"}
    return wide_job(communication=communication, **tables)


@pytest.mark.parametrize("codec", ["identity", "bf16"])
def test_changes_bring_the_same_loss_as_whole_models(codec: str):
    """In as many bytes as predicted: the first model whole, all else in the codec."""
    job = changes_job(codec)
    (_, whole), (_, changes) = run(wide_job()), run(job)
    tolerance = 1e-5 if codec == "identity" else 0.005
    assert loss(changes) == pytest.approx(loss(whole), abs=tolerance)
    traffic = job_check.forecast(wiring.build_federation(job), VirtualClock()).traffic
    assert traffic is not None
    found = [e.bytes_down for e in changes if isinstance(e, RoundFinished)]
    predicted = [traffic.of_round(index)[0] for index in range(1, ROUNDS + 1)]
    assert [Span(down, down) for down in found] == predicted
    if codec == "bf16":
        assert all(0.5 * found[0] < down < 0.51 * found[0] for down in found[1:])


@pytest.mark.flower
def test_flowers_simulation_refuses_changes():
    """It keeps no site in memory, so every other round would be lost."""
    with pytest.raises(JobError, match=r"communication\.down_content=model"):
        run(changes_job(), "flower")


def test_a_restarted_site_costs_a_round_and_gets_the_whole_model():
    """The others continue with what changed."""
    fault = {"site": "site-1", "kind": "restart", "rounds": [3]}
    job = changes_job(simulation={"faults": [fault]}, schedule={"minimum_sites": 3})
    _, seen = run(job)
    failed = [e for e in seen if isinstance(e, SiteFailed)]
    assert [(e.site, e.round_index, e.kind) for e in failed] == [
        ("site-1", 3, "not_set_up")
    ]
    answers = [e for e in seen if isinstance(e, SiteAnswered)]
    whole = [(e.site, e.round_index) for e in answers if e.bytes_down > 100_000]
    assert whole == [(f"site-{i}", 1) for i in range(4)] + [("site-1", 4)]
