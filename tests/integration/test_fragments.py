"""``communication.fragments``: rounds that exchange a part of the model."""

from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import small_job
from support.without_report import simulate
from torch.nn import functional

from clients.data.batches import stepwise
from clients.models.model_pool import ModelPool
from deploy.wiring import parts
from federation.compression.fragments import fragment_of
from federation.errors import JobError
from federation.events import (
    CostPredicted,
    Event,
    RoundFinished,
    SiteAnswered,
    Warned,
)
from federation.job.spec import JobSpec
from monitoring.runs.run_result import RunResult
from monitoring.views.run_fold import fold

pytestmark = pytest.mark.slow

ROUNDS, STEPS, BATCH, LR, SITES = 7, 3, 8, 0.2, 3
MODEL = {
    "factory": "clients.models:mlp",
    "options": {"inputs": 4, "classes": 3, "hidden": [96, 96]},
}


def job_of(levels: int = 256, fragments: int = 3, **more: Any) -> JobSpec:
    secure = {"enabled": True, "levels": levels, "clip_norm": 10.0}
    tables = {
        "privacy": {"secure_aggregation": secure | more.pop("secure", {})},
        "communication": {"down_content": "sum", "fragments": fragments},
        "aggregation": {"weights": "uniform"} | more.pop("aggregation", {}),
        "training": {
            "local_steps": STEPS,
            "batch_size": BATCH,
            "optimizer": {"lr": LR},
        },
    }
    return small_job(num_sites=SITES, rounds=ROUNDS, model=MODEL, **tables, **more)


def values(done: RunResult) -> np.ndarray:
    return np.concatenate([array.ravel() for array in done.weights.values()])


def plain_loop(job: JobSpec, fragments: int, *, drifts_on: bool = True) -> np.ndarray:
    """The same in plain PyTorch, without rounding, masks or messages."""
    data = parts.build_federation(job).site_data
    start_d, _ = ModelPool(job).initial_weights()
    pool = ModelPool(job)
    with pool.borrow() as borrowed:
        model = borrowed.module
        parameters = list(model.parameters())
        global_d = torch.from_numpy(start_d)
        drifts = {name: torch.zeros_like(global_d) for name in data}
        for round_index in range(1, ROUNDS + 1):
            fragment = fragment_of(round_index, fragments)
            sent = torch.zeros(global_d.numel(), dtype=torch.bool)
            for span in fragment.spans(global_d.numel()):
                sent[span] = True
            updates = []
            for name, (train, _) in data.items():
                torch.nn.utils.vector_to_parameters(global_d + drifts[name], parameters)
                optimizer = torch.optim.SGD(parameters, lr=LR)
                for chosen in stepwise(
                    len(train),
                    batch_size=BATCH,
                    first_batch=(round_index - 1) * STEPS,
                    num_batches=STEPS,
                    seed=job.seed,
                    site=name,
                ):
                    inputs, labels = train.batch(chosen)
                    optimizer.zero_grad()
                    functional.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                own_d = torch.nn.utils.parameters_to_vector(parameters).detach()
                update_d = own_d - global_d
                if drifts_on:
                    drifts[name] = torch.where(sent, 0.0, update_d)
                updates.append(torch.where(sent, update_d, 0.0))
            global_d = global_d + torch.stack(updates).mean(0)
    return global_d.numpy()


@pytest.mark.parametrize("fragments", [1, 3])
def test_rounds_are_those_of_a_plain_loop(fragments: int):
    """Sites keep their own values of what is not exchanged."""
    job = job_of(fragments=fragments)
    expected_d = plain_loop(job, fragments)
    start_d, _ = ModelPool(job).initial_weights()
    moved = float(np.linalg.norm(expected_d - start_d))
    found_d = values(simulate(job))
    # Steps of a fragment follow from its last sum, which is F rounds old.
    assert float(np.linalg.norm(found_d - expected_d)) < 0.02 * fragments * moved
    if fragments > 1:
        lost_d = plain_loop(job, fragments, drifts_on=False)
        assert float(np.linalg.norm(lost_d - expected_d)) > 0.2 * moved


def test_bytes_are_those_predicted_and_a_fraction():
    """In both directions, message by message."""
    sent = {}
    for fragments in (1, 3):
        seen: list[Event] = []
        simulate(job_of(4, fragments), listeners=[seen.append])
        (predicted,) = [e for e in seen if isinstance(e, CostPredicted)]
        run = fold(seen)
        assert predicted.bytes_up[0] <= run.bytes_up <= predicted.bytes_up[1]
        assert predicted.bytes_down[0] <= run.bytes_down <= predicted.bytes_down[1]
        finished = [e for e in seen if isinstance(e, RoundFinished)]
        sent[fragments] = [(e.bytes_down, e.bytes_up) for e in finished]
    for (down, up), (all_down, all_up) in zip(sent[3][4:], sent[1][4:], strict=True):
        assert up < 0.75 * all_up
        assert down < 0.75 * all_down


@pytest.mark.parametrize(("clip_norm", "told"), [(1e5, 1), (10.0, 0)])
def test_a_clip_norm_far_too_large_is_told(clip_norm: float, told: int):
    """Or the first round would damage the model, and no one would know why."""
    seen: list[Event] = []
    secure = {"clip_norm": clip_norm}
    simulate(job_of(4, 1, secure=secure), listeners=[seen.append])
    texts = [e.message for e in seen if isinstance(e, Warned)]
    assert sum("rounding changes updates" in t for t in texts) == told


@pytest.mark.parametrize(("clip_norm", "told"), [(1e7, ROUNDS), (10.0, 0)])
def test_updates_that_are_rounded_to_nothing_are_told(clip_norm: float, told: int):
    """Or a run would end as it began, and say no word."""
    seen: list[Event] = []
    given = {"enabled": True, "ring_bits": 16, "clip_norm": clip_norm}
    training = {"local_steps": STEPS, "batch_size": BATCH, "optimizer": {"lr": LR}}
    job = small_job(
        num_sites=SITES,
        rounds=ROUNDS,
        model=MODEL,
        training=training,
        aggregation={"weights": "uniform"},
        privacy={"secure_aggregation": given},
    )
    simulate(job, listeners=[seen.append])
    texts = [e.message for e in seen if isinstance(e, Warned)]
    assert sum("updates is exactly 0" in t for t in texts) == told


def test_an_average_is_sent_whole_as_predicted():
    """Without the optimiser's state: no step begins with it."""
    job = job_of(
        4,
        1,
        aggregation={"server_optimizer": {"name": "adam", "lr": 0.01}},
        selection={"model": "ema"},
    )
    seen: list[Event] = []
    simulate(job, listeners=[seen.append])
    (predicted,) = [e for e in seen if isinstance(e, CostPredicted)]
    assert predicted.bytes_down[0] <= fold(seen).bytes_down <= predicted.bytes_down[1]


def test_a_site_that_drops_out_comes_back_to_its_own_values():
    """The run goes on, and ends with a model that all agree on."""
    secure = {"threshold": SITES, "two_sites_waiver": False}
    faults = [{"site": "site-1", "kind": "restart", "rounds": [3]}]
    job = job_of(4, secure=secure, simulation={"faults": faults})
    seen: list[Event] = []
    simulate(job, listeners=[seen.append])
    finished = [e for e in seen if isinstance(e, RoundFinished)]
    assert [e.status for e in finished].count("completed") >= ROUNDS - 1
    assert finished[-1].status == "completed"


def test_more_fragments_than_blocks_are_refused():
    job = job_of(4, fragments=9)
    with pytest.raises(JobError, match="blocks of 4,096") as caught:
        simulate(job)
    assert caught.value.key == "communication.fragments"


def test_a_lost_round_costs_no_whole_model():
    """Sites that have the model are told that it has not changed."""
    faults = [{"site": "site-1", "kind": "crash", "rounds": [3]}]
    job = job_of(4, fragments=1, simulation={"faults": faults})
    seen: list[Event] = []
    simulate(job, listeners=[seen.append])
    finished = {e.round_index: e for e in seen if isinstance(e, RoundFinished)}
    assert finished[3].status == "lost"
    assert finished[4].status == "completed"
    answers = [e for e in seen if isinstance(e, SiteAnswered) and e.round_index == 4]
    down = {answer.site: answer.bytes_down for answer in answers}
    whole = 4 * ModelPool(job).layout.size
    assert (
        down["site-1"] > whole
    )  # It had not answered, and gets the optimiser's state.
    assert down["site-0"] < whole / 4
    assert down["site-2"] < whole / 4
