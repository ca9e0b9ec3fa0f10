"""A site that trains with several processes."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support import agents, forked, ranked_sites
from support.deployment import wait_for
from support.noisy_jobs import WIDTH
from support.ranked_sites import (
    TESTS,
    ForkedRanks,
    alone,
    assert_like_one,
    pids_of,
    ranked,
    wait_until_gone,
)
from support.small_jobs import regression_job, small_job

from clients.models.model_pool import ModelPool
from clients.ranks import group
from clients.ranks.ranked_trainer import RankedTrainer
from clients.training.private_steps import PrivateTraining
from clients.training.trainer import TorchTrainer
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.wiring.job_data import load_data
from federation import events
from federation.clock import SystemClock
from federation.errors import SiteError
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.messages import RoundTask, SiteUpdate, TaskKind
from monitoring.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow]

JOBS = Path(__file__).parents[2] / "jobs"
CLOUDS = ("aws-us-east-1", "gcp-us-central1")

# The last batch of an epoch has one example: the second rank gets none of it.
EPOCHS = small_job(
    rounds=3,
    training={
        "local_epochs": 2,
        "batch_size": 59,
        "proximal_mu": 0.3,
        "clip_grad_norm": 0.5,
        "optimizer": {"name": "adamw", "lr": 0.05},
    },
    evaluation={"batch_size": 5},
)
# Batches of four and five, three and two to a step.
STEPS = small_job(
    rounds=3,
    training={
        "local_steps": 7,
        "batch_size": 9,
        "accumulate": 3,
        "optimizer": {"lr": 0.5},
    },
)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Ranks find the tests' own modules, and a secret that is not for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("AWS_SECRET_ACCESS_KEY", "of the agent alone")
        yield


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a test that need not be children of its process."""
    monkeypatch.setattr(group, "subprocess", ForkedRanks)


@pytest.fixture(scope="module")
def pool() -> ModelPool:
    return ModelPool(EPOCHS)


@pytest.fixture(scope="module")
def pair(pool: ModelPool) -> Iterator[RankedTrainer]:
    """Two ranks that train EPOCHS."""
    with ranked(EPOCHS, pool) as trainer:
        yield trainer


def test_two_ranks_are_like_one(pair: RankedTrainer, pool: ModelPool):
    """Epochs whose last batch is too small to share."""
    assert_like_one(pair, alone(EPOCHS, pool), pool)


@pytest.mark.usefixtures("forks")
def test_an_objective_of_ones_own_over_ranks():
    """Its losses and its metric are those of one process."""
    job, source = regression_job(num_sites=1), "support.users_module:two_parts"
    pool = ModelPool(job)
    with ranked(job, pool, source) as trainer:
        one = alone(job, pool, source)
        assert_like_one(trainer, one, pool, rtol=1e-5)


@pytest.mark.usefixtures("forks")
def test_three_ranks_are_like_one(pool: ModelPool):
    """Accumulated batches that cannot be shared out evenly."""
    with ranked(STEPS, pool, ranks=3) as trainer:
        assert_like_one(trainer, alone(STEPS, pool), pool)


@pytest.mark.usefixtures("forks")
def test_a_killed_rank_costs_nothing_but_time(pool: ModelPool):
    """It dies while the others wait for it; the round gives the same bits."""
    weights = pool.initial_weights()
    with ranked(EPOCHS, pool) as pair:
        expected = pair.fit(*weights, round_index=2)
        for rank in (0, 1):
            before = pids_of(pair)
            os.kill(before[rank], signal.SIGSTOP)
            killer = threading.Timer(0.5, os.kill, (before[rank], signal.SIGKILL))
            killer.start()
            found = pair.fit(*weights, round_index=2)
            killer.join()
            np.testing.assert_array_equal(expected.weights_d, found.weights_d)
            assert expected.training == found.training
            assert not set(before) & set(pids_of(pair))
            wait_until_gone(before)


@pytest.mark.usefixtures("forks")
def test_a_frozen_rank_holds_up_and_spoils_nothing(pool: ModelPool):
    """It continues within the timeout, and nothing is begun again."""
    weights = pool.initial_weights()
    with ranked(EPOCHS, pool) as pair:
        expected = pair.fit(*weights, round_index=2)
        before = pids_of(pair)
        os.kill(before[1], signal.SIGSTOP)
        waker = threading.Timer(1.0, os.kill, (before[1], signal.SIGCONT))
        waker.start()
        found = pair.fit(*weights, round_index=2)
        waker.join()
        np.testing.assert_array_equal(expected.weights_d, found.weights_d)
        assert before == pids_of(pair)


@pytest.mark.usefixtures("forks")
@pytest.mark.long
def test_a_rank_that_stays_frozen_is_given_up(pool: ModelPool):
    """The others wait for their timeout, and new ranks do the round again.

    The timeout is also that of the meeting at the start, which a busy machine may need
    more than one attempt for.
    """
    weights = pool.initial_weights()
    with ranked(EPOCHS, pool, timeout_seconds=8.0, restarts=5) as trainer:
        expected = trainer.fit(*weights, round_index=1)
        before = pids_of(trainer)
        os.kill(before[1], signal.SIGSTOP)
        found = trainer.fit(*weights, round_index=1)
        np.testing.assert_array_equal(expected.weights_d, found.weights_d)
        assert not set(before) & set(pids_of(trainer))
    wait_until_gone(before)


def test_ranks_listen_on_the_loopback_alone(pair: RankedTrainer, pool: ModelPool):
    """Gloo's ports are the only ones, and nobody outside reaches them."""
    pair.evaluate(*pool.initial_weights(), round_index=1)
    hosts = {host for pid in pids_of(pair) for host in listening(pid)}
    assert hosts == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens, as the kernel writes them."""
    inodes = {
        str(path.readlink()).removeprefix("socket:[").rstrip("]")
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if str(path.readlink()).startswith("socket:")
    }
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_ranks_see_no_credentials(pair: RankedTrainer, pool: ModelPool):
    """What the agent's environment holds for others does not come to them."""
    pair.evaluate(*pool.initial_weights(), round_index=1)
    for pid in pids_of(pair):
        seen = Path(f"/proc/{pid}/environ").read_text()
        assert f"PYTHONPATH={TESTS}" in seen
        assert "of the agent alone" not in seen


@pytest.mark.usefixtures("forks")
def test_ranks_that_die_each_time_fail_the_round():
    """So many attempts, and the last words of a rank."""
    job = small_job(model={"factory": "support.dying_models:dying_network"})
    pool = ModelPool(job)
    with (
        ranked(job, pool, restarts=1) as trainer,
        pytest.raises(SiteError, match=r"exit code 3.* 2 attempts"),
    ):
        trainer.evaluate(*pool.initial_weights(), round_index=1)


@pytest.mark.usefixtures("forks")
def test_an_error_that_another_attempt_would_not_mend():
    """It is told once, as with one rank, and by which rank."""
    job = small_job(
        training={"task": "causal_lm", "local_steps": 1, "optimizer": {"lr": 0.5}}
    )
    pool = ModelPool(job)
    with (
        ranked(job, pool) as trainer,
        pytest.raises(SiteError, match=r"rank [01]: causal_lm needs windows"),
    ):
        trainer.fit(*pool.initial_weights(), round_index=1)
    assert pids_of(trainer) == []


@pytest.mark.usefixtures("forks")
def test_words_of_an_objective_stay_in_the_log_of_its_rank(
    capfd: pytest.CaptureFixture[str],
):
    """The agent hears from a rank what may leave the site, and no more."""
    job = small_job(
        training={
            "task": "support.dying_models:quoting_loss",
            "local_steps": 1,
            "optimizer": {"lr": 0.5},
        }
    )
    pool = ModelPool(job)
    said = r"rank [01]: support.dying_models:quoting_loss failed with KeyError"
    with ranked(job, pool) as trainer, pytest.raises(SiteError, match=said) as caught:
        trainer.fit(*pool.initial_weights(), round_index=1)
    assert "record 17" not in str(caught.value)
    assert "record 17" in capfd.readouterr().err


@pytest.mark.usefixtures("forks")
def test_what_is_wrong_with_the_data_stays_at_the_site(
    pool: ModelPool, capfd: pytest.CaptureFixture[str]
):
    """The error that travels names no function; the log does, without a traceback."""
    source = "support.small_jobs:not_there"
    with (
        ranked(EPOCHS, pool, source) as trainer,
        pytest.raises(SiteError, match=r"cannot start; .*log says") as caught,
    ):
        trainer.evaluate(*pool.initial_weights(), round_index=1)
    assert "not_there" not in str(caught.value)
    logged = capfd.readouterr().err
    assert "not_there" in logged
    assert "Traceback" not in logged


def test_ranks_do_not_outlive_their_agent(tmp_path: Path):
    """Killed, it can tell them nothing."""
    out, err = tmp_path / "out", tmp_path / "err"
    agent = forked.shared().start(
        call="support.doomed_agent:train", out=out, err=err, environment=os.environ
    )
    wait_for(lambda: "\n" in out.read_text(), f"two ranks ({err})")
    pids = [int(pid) for pid in out.read_text().split()]
    agent.kill()
    assert agent.wait(120) == -signal.SIGKILL
    assert len(pids) == 2
    wait_until_gone(pids)


@pytest.mark.usefixtures("forks")
def test_an_agent_trains_with_ranks(tmp_path: Path, pool: ModelPool):
    """From ``site.toml`` to the update, and nobody is left after the run."""
    members = agents.consortium("site-0")
    job = EPOCHS
    updates = []
    for compute in ({}, {"ranks": 2}, {"ranks": 2, "sharding": "full"}):
        folder = tmp_path / str(len(updates))
        agent = agents.agent(folder, "site-0", members, compute=compute)
        try:
            introduction = agents.propose(agent, members, agents.proposal(job))
            assert introduction.refused == ""
            updates.append(agent.answer(task(pool)))
        finally:
            agent.close()
    one, *others = updates
    assert isinstance(one, SiteUpdate)
    for other in others:
        assert isinstance(other, SiteUpdate)
        np.testing.assert_allclose(one.delta_d, other.delta_d, atol=2e-6)
        assert one.num_examples == other.num_examples


@pytest.mark.usefixtures("forks")
def test_ranks_take_the_order_of_the_sites_secret():
    """As one process with that seed, and otherwise than with the job's."""
    job = small_job(
        training={"local_steps": 3, "batch_size": 4, "optimizer": {"lr": 0.5}}
    )
    pool, secret = ModelPool(job), (1 << 256) - 1
    train, held_out = load_data(ranked_sites.BLOBS, {})
    weights = pool.initial_weights()
    one, other = (
        TorchTrainer(
            job, ranked_sites.SITE, pool=pool, train=train, held_out=held_out, seed=seed
        ).fit(*weights, round_index=1)
        for seed in (secret, None)
    )
    with ranked(job, pool, ranked_sites.BLOBS, order_seed=secret) as trainer:
        found = trainer.fit(*weights, round_index=1)
    np.testing.assert_allclose(found.weights_d, one.weights_d, atol=1e-5)
    assert np.abs(found.weights_d - other.weights_d).max() > 1e-3


def private_job(num_records: int, num_inputs: int) -> JobSpec:
    """A step of plain SGD over all records, with gradients clipped to 1."""
    return small_job(
        model={
            "factory": "clients.models:logistic_regression",
            "options": {"inputs": num_inputs, "classes": 3},
        },
        training={
            "local_steps": 1,
            "batch_size": num_records,
            "optimizer": {"lr": 1.0},
        },
        aggregation={"weights": "uniform"},
        privacy={
            "differential_privacy": {
                "unit": "record",
                "target_epsilon": 8.0,
                "clip_norm": 1.0,
            }
        },
    )


@pytest.mark.usefixtures("forks")
def test_private_ranks_add_up_and_add_noise_once():
    """Every record's clipped gradient, and the noise that one rank would add.

    Noise is drawn from the system: the bounds are ten standard deviations of what one
    value and what the estimate over 12,000 values may be off.
    """
    num_records, num_inputs = 448, 4 + WIDTH  # On the grid: every record is drawn.
    job = private_job(num_records, num_inputs)
    pool = ModelPool(job)
    private = PrivateTraining(clip_norm=1.0, noise_multiplier=0.25)
    source = "support.noisy_jobs:wide_blobs"
    train, held_out = load_data(source, {})
    weights = pool.initial_weights()
    one = TorchTrainer(
        job,
        ranked_sites.SITE,
        pool=pool,
        train=train,
        held_out=held_out,
        private=private,
    ).fit(*weights, round_index=1)
    with ranked(job, pool, source, private) as trainer:
        two = trainer.fit(*weights, round_index=1)
        again = trainer.fit(*weights, round_index=1)
    noise = private.noise_multiplier / num_records
    one_d, two_d, again_d = (
        (result.weights_d - weights[0])[: 3 * num_inputs].reshape(3, num_inputs)
        for result in (one, two, again)
    )
    assert np.abs(one_d[:, :4]).max() > 0.05
    np.testing.assert_allclose(one_d[:, :4], two_d[:, :4], atol=10 * np.sqrt(2) * noise)
    size = 3 * WIDTH
    assert np.std(two_d[:, 4:]) == pytest.approx(
        noise, rel=10 / np.sqrt(2 * size) + 0.002
    )
    assert not np.array_equal(two_d, again_d)
    assert two.training is None


@pytest.mark.usefixtures("forks")
def test_an_agent_takes_private_steps_with_ranks(tmp_path: Path):
    """Its ledger is charged once a round, also if a rank dies in it."""
    members = agents.consortium("site-0")
    job = private_job(30, 4)
    pool = ModelPool(job)
    agent = agents.agent(tmp_path, "site-0", members, compute={"ranks": 2})
    try:
        made = agents.proposal(job)
        introduction = agents.propose(agent, members, made)
        assert introduction.refused == ""
        first = ForkedRanks.living()
        assert len(first) == 2
        os.kill(first[1], signal.SIGKILL)
        update = agent.answer(task(pool))
    finally:
        agent.close()
    assert isinstance(update, SiteUpdate), update
    assert (update.num_examples, update.training) == (0, None)
    assert update.spent is not None
    ledger = tmp_path / "site-0" / "runs" / agents.RUN_ID / "sites" / "site-0"
    entries = "".join(path.read_text() for path in ledger.glob("*.jsonl"))
    assert entries.count('"train"') == 1
    assert ForkedRanks.living() == []


def children(before: Sequence[int] = ()) -> list[int]:
    """Ranks of this process, but for those of before, in order."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(pid) for pid in path.read_text().split()]
    return sorted(pid for pid in set(found) - set(before) if is_rank(pid))


def is_rank(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline")
        return b"deploy.site_host.rank_process" in command.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
def test_a_whole_run_survives_the_death_of_a_rank(tmp_path: Path):
    """Secure aggregation and private steps; one of two sites trains with two ranks."""
    before = children()
    members = agents.consortium(*CLOUDS)
    compute = ({}, {"compute": {"ranks": 2}})
    grid = agents.AgentGrid(
        {
            name: agents.agent(tmp_path, name, members, **tables)
            for name, tables in zip(CLOUDS, compute, strict=True)
        }
    )
    folder = RunFolder(tmp_path / "runs" / agents.RUN_ID)
    folder.path.mkdir(parents=True)
    job = job_file.load(JOBS / "private.toml", ["rounds=2"])
    folder.write_job(job)
    seen: list[events.Event] = []
    killed: list[int] = []

    def kill(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished) and event.round_index == 1:
            killed.extend(children(before))
            os.kill(killed[0], signal.SIGKILL)

    coordinator = DeployedRun(
        folder,
        members.parties,
        clock=SystemClock(),
        listeners=[seen.append, kill],
        stop_requested=lambda: False,
    )
    with grid.connected():
        result = coordinator.run(grid.connect)
        assert len(killed) == 2
        assert not set(killed) & set(children(before))
    finished = [e for e in seen if isinstance(e, events.RoundFinished)]
    assert [(e.round_index, e.status) for e in finished] == [
        (1, "completed"),
        (2, "completed"),
    ]
    assert not any(isinstance(e, events.SiteFailed) for e in seen)
    assert result.status == "completed"
    assert children(before) == []


def task(pool: ModelPool) -> RoundTask:
    weights_d, integers_m = pool.initial_weights()
    return RoundTask(
        run_id=agents.RUN_ID,
        round_index=1,
        site=ranked_sites.SITE,
        kind=TaskKind.TRAIN,
        layout_digest=pool.layout.digest,
        weights_d=weights_d,
        integers_m=integers_m,
        evaluate=True,
        evaluate_after=False,
    )
