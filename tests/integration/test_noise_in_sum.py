"""Whole runs whose noise adds up inside the secure sum: it is there, and paid for."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_jobs import WIDTH, noisy_job
from support.without_report import simulate

from clients.data import digits
from clients.frozen_features import oriented_gradients
from clients.privacy import sum_plan as sum_privacy
from deploy.wiring import parts as wiring
from federation.errors import JobError
from federation.events import Event, PrivacyPlanned, RoundFinished, SiteAnswered
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult
from privacy.dp import accountant
from privacy.dp.adaptive_clip import CLIP_RANGE

pytestmark = [pytest.mark.slow]

JOBS = Path(__file__).parents[2] / "jobs"
DP = "privacy.differential_privacy"
UNITS = ["joint", "site"]
FORCED = {"joint": {}, "site": {"accept_low_signal": True}}


def _of(seen: Sequence[Event], kind: type[Any]) -> list[Any]:
    return [event for event in seen if isinstance(event, kind)]


def _unmoved(job: JobSpec, result: RunResult) -> np.ndarray:
    """What a run made of weights whose gradient is zero: noise and nothing else."""
    pool = wiring.build_federation(job).pool
    (start,) = [
        view
        for spec, view in pool.layout.float_views(pool.initial_weights()[0])
        if spec.name.endswith("weight")
    ]
    (end,) = [w for name, w in result.state_dict().items() if name.endswith("weight")]
    return (end.numpy() - start)[:, 4:].astype(np.float64).reshape(-1)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("away", ["", "silent", "hang"])
def test_opened_sum_holds_the_noise_of_all_who_answered(unit: str, away: str):
    """Whether all must answer, or three of four are enough.

    Then one is silent until the deadline, or later than a grace, in virtual time.
    """
    silent, hangs = away != "", away == "hang"
    faults = [{"kind": away, "site": "site-2"} | ({"seconds": 50.0} if hangs else {})]
    machines = [
        {"site": f"site-{i}", "examples_per_second": 100.0} for i in range(4 * hangs)
    ]
    job = noisy_job(
        unit,
        threshold=3 if silent else None,
        private=FORCED[unit],
        rounds=1,
        simulation={"faults": faults if silent else [], "machines": machines},
        schedule={"round_deadline_seconds": 5.0 if not hangs else 100.0}
        | ({"grace": 0.5} if hangs else {}),
    )
    found = sum_privacy.plan(wiring.build_federation(job))
    seen: list[Event] = []
    engine = "virtual" if hangs else "inproc"
    noise = _unmoved(job, simulate(job, listeners=[seen.append], engine=engine))
    (finished,) = _of(seen, RoundFinished)
    num_sites = len(finished.answered)
    assert num_sites == (3 if silent else 4)
    # The mean over those who answered, in weight units.
    std = found.ring.noise_std / found.ring.scale / math.sqrt(num_sites)
    tolerance = 7 * math.sqrt(2 / (3 * WIDTH))  # False alarm 3e-12.
    assert noise @ noise / noise.size / std**2 == pytest.approx(1, abs=tolerance)
    # The honest shares alone are worth what the accountant was told.
    honest = (3 if silent else 4) - 1
    assert found.share.honest == honest
    event = next(iter(found.events.values()))
    worth = found.ring.noise_std * math.sqrt(honest) / found.ring.scale
    assert worth >= event.noise_multiplier * found.share.sensitivity


@pytest.mark.parametrize("unit", UNITS)
def test_every_round_is_charged(unit: str, tmp_path: Path):
    """At each site, before its answer; the sum of the events is what is reported."""
    job = noisy_job(unit, private=FORCED[unit], rounds=3)
    plan = sum_privacy.plan(wiring.build_federation(job))
    seen: list[Event] = []
    result = simulate(job, folder=tmp_path / "run", listeners=[seen.append])
    told = _of(seen, SiteAnswered)
    for name, event in plan.events.items():
        delta = plan.deltas[name]
        expected = [accountant.epsilon([event] * rounds, delta) for rounds in (1, 2, 3)]
        spent = [e.spent for e in told if e.site == name]
        assert expected == pytest.approx([one.epsilon for one in spent], rel=1e-9)
        assert {one.delta for one in spent} == {delta}
        lines = (tmp_path / "run" / "sites" / name / "ledger.jsonl").read_text()
        assert lines.count('"train"') == 3
    assert result.summary()["epsilon"] == max(e.spent.epsilon for e in told)
    assert result.summary()["epsilon"] < 8.0


def test_run_learns_though_a_site_is_silent():
    """Three of four are enough, and nobody pays for more than its noise is worth."""
    fault = "{kind='silent', site='gcp-us-central1', rounds=[2, 4, 6, 8, 10]}"
    job = job_file.load(
        JOBS / "joint.toml",
        [
            "rounds=20",
            "evaluation.every=0",
            "privacy.secure_aggregation.threshold=3",
            f"simulation.faults=[{fault}]",
        ],
    )
    seen: list[Event] = []
    result = simulate(job, listeners=[seen.append])
    assert result.rounds_completed == 20
    answered = [len(e.answered) for e in _of(seen, RoundFinished)]
    assert answered[:12] == [4, 3] * 5 + [4, 4]
    spent = [e.spent.epsilon for e in _of(seen, SiteAnswered) if e.round_index == 20]
    assert len(spent) == 4
    assert max(spent) <= 8.0
    _, held_out = digits()
    model = oriented_gradients()
    model.load_state_dict(result.state_dict(), strict=False)
    found = model(torch.from_numpy(held_out.inputs)).argmax(1).numpy()
    assert (found == held_out.targets).mean() > 0.85


def test_two_runs_with_one_seed_have_other_noise():
    """Seeds decide the model and the data, and nothing that protects them."""
    job = noisy_job("joint", rounds=1)
    one, other = (_unmoved(job, simulate(job)) for _ in range(2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(one.size)


def _clips(seen: Sequence[Event]) -> list[float]:
    return [e.update_clip for e in _of(seen, RoundFinished)]


def _adaptive(first: float, **private: Any) -> JobSpec:
    """Much noise on the updates, and little on eight bits."""
    return noisy_job(
        "site",
        num_sites=8,
        private={
            "adaptive_clip": True,
            "accept_low_signal": True,
            "clip_norm": first,
            "target_epsilon": 300.0,
            **private,
        },
        rounds=6,
        data={
            "source": "support.small_jobs:blobs",
            "options": {"num_train": 480, "num_held_out": 160},
        },
        model={"options": {"inputs": 4, "classes": 3}},
    )


@pytest.mark.parametrize(("first", "is_rising"), [(1e-4, True), (1e3, False)])
def test_clip_norm_moves_towards_the_updates(first: float, is_rising: bool):  # noqa: FBT001
    """In geometric steps of at most ``exp(rate / 2)``, from either side."""
    seen: list[Event] = []
    simulate(_adaptive(first, clip_rate=0.4), listeners=[seen.append])
    clips = _clips(seen)
    assert clips[0] == first
    factors = [new / old for old, new in pairwise(clips)]
    assert all(math.exp(-0.2) <= f * (1 + 1e-12) for f in factors)
    assert all(f <= math.exp(0.2) * (1 + 1e-12) for f in factors)
    assert (clips[-1] > 2 * first) if is_rising else (clips[-1] < first / 2)


def test_clip_norm_survives_a_crash(tmp_path: Path):
    """It is in the checkpoint: a resumed run continues where it was."""
    job, seen = _adaptive(1e3), []
    rounds_left = iter([False] * 3)
    first = simulate(
        job,
        folder=tmp_path / "run",
        listeners=[seen.append],
        stop_requested=lambda: next(rounds_left, True),
    )
    assert first.status == "stopped"
    done = simulate(job, folder=tmp_path / "run", resume=True, listeners=[seen.append])
    assert done.status == "completed"
    clips = _clips(seen)
    assert len(clips) == 6
    # Every update is within it, so each round multiplies by about exp(-0.1).
    factors = [new / old for old, new in pairwise(clips)]
    assert all(factor < 0.97 for factor in factors)


def test_aggregate_is_scaled_back_to_the_clip_norm_of_the_round():
    """One that came down by orders of magnitude leaves noise in proportion."""
    job = _adaptive(1e3, clip_rate=6.0)
    seen: list[Event] = []
    simulate(job, listeners=[seen.append])
    norms = [e.update_norm for e in _of(seen, RoundFinished)]
    clips = _clips(seen)
    assert max(clips) == 1e3
    assert 1e3 / CLIP_RANGE < min(clips) < 5.0
    size, plan = 15, sum_privacy.plan(wiring.build_federation(job))
    noise = plan.ring.noise_std / plan.ring.scale / math.sqrt(8) * math.sqrt(size) / 1e3
    for norm, clip in zip(norms, clips, strict=True):
        assert norm < clip * (1 + 2.5 * noise)


def test_statistics_of_layers_stay_at_their_site():
    """Batch normalisation is replaced; what other layers note is put back."""
    job = noisy_job(
        "site",
        private={"accept_low_signal": True},
        model={
            "factory": "support.noisy_jobs:normalised",
            "integer_buffers": {"*.num_batches_tracked": "keep"},
        },
        training={"local_steps": 3},
    )
    seen: list[Event] = []
    result = simulate(job, listeners=[seen.append])
    (planned,) = _of(seen, PrivacyPlanned)
    assert planned.replaced == ("1: BatchNorm1d by GroupNorm",)
    state = result.state_dict()
    assert not state["3.running_mean"].any()
    assert (state["3.running_var"] == 1).all()
    assert state["3.num_batches_tracked"] == 0
    assert state["1.bias"].any()  # It is trained, or has noise at the least.


@pytest.mark.parametrize("unit", UNITS)
def test_training_that_leaves_the_numbers_is_not_told(unit: str):
    """Such a site answers with noise alone: a word of it would have no noise."""
    job = noisy_job(
        unit,
        private=FORCED[unit],
        model={"factory": "support.noisy_jobs:overflowing"},
        rounds=1,
    )
    seen: list[Event] = []
    result = simulate(job, listeners=[seen.append])
    assert result.rounds_completed == 1
    assert len(_of(seen, SiteAnswered)) == 4
    assert all(np.isfinite(w).all() for w in result.weights.values())


def test_low_signal_is_refused_with_numbers_and_accepted_when_forced():
    """What it would be, and what would raise it."""
    with pytest.raises(JobError) as caught:
        simulate(noisy_job("site"))
    assert caught.value.key == f"{DP}.accept_low_signal"
    text = str(caught.value)
    assert "the mean of 4 updates of 12303 values" in text
    assert "below 0.5" in text
    seen: list[Event] = []
    simulate(noisy_job("site", private=FORCED["site"]), listeners=[seen.append])
    (planned,) = _of(seen, PrivacyPlanned)
    assert planned.signal_to_noise is not None
    assert 0 < planned.signal_to_noise < 0.5
    named = re.search(r"ratio of ([0-9.]+),", text)
    assert named is not None
    assert float(named[1]) == pytest.approx(planned.signal_to_noise, rel=0.02)


@pytest.mark.parametrize(
    ("unit", "change", "key", "text"),
    [
        ("site", {"delta": 0.03}, f"{DP}.delta", "0.03 is too large for 4 sites"),
        ("joint", {"delta": 0.03}, f"{DP}.delta", "too large for 1"),
        (
            "joint",
            {"clip_norm": 1e-9, "noise_multiplier": 1e9},
            "privacy.secure_aggregation",
            "an amplitude of",
        ),
    ],
)
def test_plan_that_cannot_be_kept_is_refused(
    unit: str, change: dict[str, Any], key: str, text: str
):
    """Before anything is trained."""
    with pytest.raises(JobError, match=text) as caught:
        simulate(noisy_job(unit, private=change))
    assert caught.value.key == key


@pytest.mark.parametrize("bits", [24, 32])
def test_noise_of_any_size_is_drawn(bits: int):
    """Few sites and 32 bits make shares too large for one draw: several are added."""
    job = noisy_job(
        "site",
        private={"accept_low_signal": True},
        privacy={"secure_aggregation": {"ring_bits": bits}},
    )
    assert simulate(job).status == "completed"
