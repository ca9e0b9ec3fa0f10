"""Local steps that a site keeps when it leaves in the middle of a round."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import blobs, small_job
from torch import nn

from clients.data.datasets import as_dataset
from clients.methods import half_precision
from clients.models.model_pool import ModelPool
from clients.privacy.site_plans import PrivateSites
from clients.training.kept_steps import KeptSteps, LeftAtStep, _parsed, most_bytes
from clients.training.trainer import TorchTrainer
from cloud_adapters.storage.disk.store import LocalStore
from deploy.wiring.parts import build_federation
from federation.clock import VirtualClock
from federation.ids import RunId, SiteId
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.dp.mechanism import GaussianMechanism

SITE, RUN = SiteId("site-0"), RunId("run-1")
TRAIN, HELD_OUT = (as_dataset(part, name="blobs") for part in blobs())
STEPS, KEY = 6, "sites/site-0/steps"


class Drawing(nn.Module):
    """It draws, has statistics, and buffers that its state leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        # Rotary positions are often kept as complex numbers.
        turns = torch.ones(2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        found: torch.Tensor = self.layers(inputs) * (1 + 0.1 * self.calls)
        return found


def drawing() -> nn.Module:
    return Drawing()


class Counting(torch.optim.SGD):
    """Its state of a parameter is a number, not a tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = 1
        return super().step(closure)


class Adapting(torch.optim.SGD):
    """It has state of a whole group, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] = group.get("d", 1.0) * 2
            group["lr"] *= group["d"]
        return super().step(closure)


def job_of(factory: str = f"{__name__}:drawing", **training: Any) -> JobSpec:
    keys = {"batch_size": 8, **training}
    if "local_epochs" not in keys:
        keys.setdefault("local_steps", STEPS)
    return small_job(
        model={"factory": factory, "options": {}},
        training={"optimizer": {"name": "adamw", "lr": 0.1}, **keys},
    )


JOB = job_of()


class Machine:
    """One machine of the site: a process, with the site's store."""

    def __init__(
        self,
        folder: Path,
        job: JobSpec = JOB,
        *,
        goes_after: int = 0,
        clock: VirtualClock | None = None,
        run: RunId = RUN,
        **options: Any,
    ) -> None:
        looks = iter(range(1, 1000))
        self.store, self.pool = LocalStore(folder), ModelPool(job)
        self.confirmed: list[bool] = []
        kept = KeptSteps(
            SITE,
            self.store,
            run_id=run,
            job=job,
            clock=clock or VirtualClock(),
            leaves=lambda: next(looks) == goes_after,
            confirm=lambda: self.confirmed.append(self.is_kept()),
            **options,
        )
        self.trainer = TorchTrainer(
            job,
            SITE,
            pool=self.pool,
            train=TRAIN,
            held_out=HELD_OUT,
            kept_steps=kept,
        )

    def is_kept(self) -> bool:
        return any(True for _ in self.store.list(KEY))

    def fit(self, round_index: int = 2, scale: float = 1.0) -> LocalWeights:
        weights_d, integers_m = self.pool.initial_weights()
        result = self.trainer.fit(
            weights_d * np.float32(scale), integers_m, round_index=round_index
        )
        assert isinstance(result, LocalWeights)
        return result


def left(folder: Path, job: JobSpec = JOB, *, after: int = 3, **options: Any) -> None:
    """A machine leaves after some steps of round 2."""
    machine = Machine(folder, job, goes_after=after, **options)
    with pytest.raises(LeftAtStep, match=f"its {after} steps are kept"):
        machine.fit()
    assert machine.confirmed == [True]  # In the home, before the process ends.


def is_same(one: LocalWeights, other: LocalWeights) -> bool:
    return (
        np.array_equal(one.weights_d, other.weights_d)
        and np.array_equal(one.integers_m, other.integers_m)
        and (one.num_steps, one.training) == (other.num_steps, other.training)
    )


@pytest.mark.parametrize("after", [1, 3, STEPS])
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "proximal_mu": 0.1},
        {"accumulate": 2},
        {"local_epochs": 1},
    ],
)
def test_replacement_ends_with_the_same_bits(
    tmp_path: Path, after: int, training: dict[str, Any]
):
    """The model draws, and its optimiser has moments."""
    job = job_of(**training)
    expected = Machine(tmp_path / "undisturbed", job).fit()
    left(tmp_path / "site", job, after=after)
    second = Machine(tmp_path / "site", job)
    assert is_same(second.fit(), expected)
    assert not second.is_kept()


def test_the_scale_of_losses_is_continued_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps are skipped on both machines, and every one of them is counted."""
    monkeypatch.setattr(half_precision, "_FIRST_SCALE", 2.0**18)
    job = job_of(precision="fp16")
    expected = Machine(tmp_path / "undisturbed", job).fit()
    left(tmp_path / "site", job, after=2)
    found = Machine(tmp_path / "site", job).fit()
    assert is_same(found, expected)
    scale, since, skipped = found.kept["loss_scale"].tolist()
    assert [scale, since, skipped] == expected.kept["loss_scale"].tolist()
    assert 2 < skipped < STEPS


def test_personal_parts_are_continued_too(tmp_path: Path):
    """Of a layer with statistics: they end with the same bits."""
    personal = ["layers.0.*", "layers.1.*"]
    job = small_job(
        model={"factory": f"{__name__}:drawing", "personal": personal},
        training={
            "optimizer": {"name": "adamw", "lr": 0.1},
            "batch_size": 8,
            "local_steps": STEPS,
        },
    )
    expected = Machine(tmp_path / "undisturbed", job).fit()
    left(tmp_path / "site", job)
    found = Machine(tmp_path / "site", job).fit()
    assert is_same(found, expected)
    np.testing.assert_array_equal(found.kept["personal"], expected.kept["personal"])
    assert found.kept["personal"].size == 4 * 8 + 8 + 4 * 8


def test_it_continues_and_does_not_begin_again(tmp_path: Path, caplog: Any):
    """Every step is taken once."""
    left(tmp_path, after=4)
    taken: list[int] = []
    machine = Machine(tmp_path)
    machine.trainer.ends_early = lambda: bool(taken.append(1))
    caplog.set_level(logging.WARNING)
    machine.fit()
    assert len(taken) == STEPS - 4
    assert "continues round 2 after step 4" in caplog.text


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
    ],
)
def test_damaged_state_is_ignored(
    tmp_path: Path, caplog: Any, spoil: Callable[[Path], object]
):
    """The round begins anew, and other state of the site stays."""
    expected = Machine(tmp_path / "undisturbed").fit()
    folder = tmp_path / "site"
    left(folder)
    other = folder / "sites" / SITE / "state-0000000001"
    other.write_bytes(b"what a round left")
    spoil(folder / KEY)
    assert is_same(Machine(folder).fit(), expected)
    assert other.read_bytes() == b"what a round left"
    assert KEY in caplog.text


@pytest.mark.parametrize(
    ("again", "word"),
    [
        ({"round_index": 3}, "round"),
        ({"scale": 0.5}, "start"),
    ],
)
def test_another_task_does_not_continue_it(
    tmp_path: Path, caplog: Any, again: dict[str, Any], word: str
):
    """The aggregator has gone on without it."""
    expected = Machine(tmp_path / "undisturbed").fit(**again)
    left(tmp_path / "site")
    second = Machine(tmp_path / "site")
    assert is_same(second.fit(**again), expected)
    assert f"belongs to another {word}" in caplog.text
    assert not second.is_kept()


@pytest.mark.parametrize(
    "others",
    [{"run": RunId("run-2")}, {"job": job_of(optimizer={"name": "sgd", "lr": 0.2})}],
)
def test_another_run_does_not_continue_it(tmp_path: Path, others: dict[str, Any]):
    """Nor the same run with another contract."""
    expected = Machine(tmp_path / "undisturbed", **others).fit()
    left(tmp_path / "site")
    assert is_same(Machine(tmp_path / "site", **others).fit(), expected)


def test_writing_ends_with_the_time_that_is_left(tmp_path: Path):
    """What was kept before stays."""
    left(tmp_path, after=2)

    class Slow(VirtualClock):
        def monotonic(self) -> float:
            self.sleep(15.0)
            return super().monotonic()

    before = (tmp_path / KEY).read_bytes()
    machine = Machine(tmp_path, goes_after=2, clock=Slow())
    with pytest.raises(LeftAtStep, match="takes more than 20 s"):
        machine.fit()
    assert (tmp_path / KEY).read_bytes() == before


def test_copies_without_a_notice(tmp_path: Path):
    """A machine that is killed has lost what came after the last one."""
    clock = VirtualClock()
    machine = Machine(tmp_path, clock=clock, every_seconds=30.0)
    taken: list[bool] = []

    def killed() -> bool:
        taken.append(machine.is_kept())
        clock.sleep(20.0)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return False

    machine.trainer.ends_early = killed
    with pytest.raises(KeyboardInterrupt):
        machine.fit()
    assert taken == [False, False, True, True]
    expected = Machine(tmp_path / "undisturbed").fit()
    assert is_same(Machine(tmp_path).fit(), expected)


@pytest.mark.parametrize("optimizer", [Counting, Adapting])
def test_optimiser_with_other_state_keeps_nothing(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer]
):
    """Copies do not fail its rounds, and no round continues with a part of it."""
    name = f"{__name__}:{optimizer.__name__}"
    job = job_of(optimizer={"name": name, "lr": 1e-4})
    expected = Machine(tmp_path / "undisturbed", job).fit()
    clock = VirtualClock()
    machine = Machine(tmp_path / "site", job, clock=clock, every_seconds=1.0)
    machine.trainer.ends_early = lambda: bool(clock.sleep(2.0))
    assert is_same(machine.fit(), expected)
    leaving = Machine(tmp_path / "site", job, goes_after=3)
    with pytest.raises(LeftAtStep, match="steps are lost"):
        leaving.fit()
    assert not leaving.is_kept()


SECURE = {"secure_aggregation": {"enabled": True}}


def private(unit: str) -> dict[str, Any]:
    table = {"unit": unit, "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-5}
    return {"differential_privacy": table}


@pytest.mark.parametrize(
    ("privacy", "continues", "repeats"),
    [
        ({}, True, True),
        (SECURE, False, False),  # A round is answered once, and others take its steps.
        (private("record"), True, True),
        (private("record") | SECURE, True, False),
        (private("site") | SECURE, False, False),
        (private("joint") | SECURE, False, False),
    ],
)
def test_which_rounds_are_continued(
    privacy: dict[str, Any],
    continues: bool,  # noqa: FBT001
    repeats: bool,  # noqa: FBT001
):
    job = small_job(
        num_sites=3,
        privacy=privacy,
        aggregation={"weights": "uniform"},
        evaluation={"every": 0},
    )
    assert (job.continues_rounds, job.repeats_tasks) == (continues, repeats)
    ahead = {"local_steps": 4, "overlap_steps": 1}
    assert not small_job(training=ahead).continues_rounds


def same(count: int) -> bytes:
    """Keys that do not depend on who asks first."""
    return bytes(count)


class PrivateMachine:
    """One machine of a private site, with a ledger in its folder."""

    def __init__(
        self, folder: Path, *, goes_after: int = 0, steps: int = STEPS
    ) -> None:
        looks = iter(range(1, 1000))
        job = small_job(
            rounds=3,
            model={"factory": f"{__name__}:dropping", "options": {}},
            training={
                "optimizer": {"name": "adamw", "lr": 0.1},
                "batch_size": 8,
                "local_steps": steps,
            },
            aggregation={"weights": "uniform"},
            evaluation={"every": 0},
            privacy=private("record"),
        )
        kept = KeptSteps(
            SITE,
            LocalStore(folder),
            run_id=RUN,
            job=job,
            clock=VirtualClock(),
            leaves=lambda: next(looks) == goes_after,
        )
        federation = replace(build_federation(job), kept_steps=kept)
        self.sites = PrivateSites(
            federation, run_id=RUN, folder=folder, clock=VirtualClock(1.8e9)
        )
        plan = self.sites.plans[SITE]
        assert plan.training is not None
        training = replace(plan.training, noise_multiplier=1.0, random_bytes=same)
        self.sites.plans = {SITE: replace(plan, training=training)}
        self.pool = federation.pool

    def fit(self, round_index: int) -> LocalWeights:
        with self.sites:
            trainer = self.sites.trainer(SITE)
            trainer.pay(round_index=round_index, trains=True, evaluations=0)
            weights = self.pool.initial_weights()
            result = trainer.fit(*weights, round_index=round_index)
            assert isinstance(result, LocalWeights)
            return result


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize("round_index", [1, 2])
def test_private_steps_go_on_where_they_were_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_index: int
):
    """In the same round, or with secure aggregation in the next: none is redrawn."""
    released = []
    real = GaussianMechanism.release_

    def counted(self: GaussianMechanism, *arguments: Any) -> None:
        released.append(self.noise_multiplier)
        real(self, *arguments)

    monkeypatch.setattr(GaussianMechanism, "release_", counted)
    with pytest.raises(LeftAtStep, match="its 4 steps are kept"):
        PrivateMachine(tmp_path, goes_after=4).fit(1)
    assert len(released) == 4
    head, arrays = _parsed(memoryview((tmp_path / KEY).read_bytes()))
    assert "round" not in head["of"]
    assert not [name for name in arrays if name.startswith("generator")]
    assert PrivateMachine(tmp_path).fit(round_index).num_steps == STEPS
    assert len(released) == STEPS
    found = read_file(tmp_path / "sites" / SITE / LEDGER_NAME).charges
    assert [(c.round_index, c.event.steps) for c in found] == [
        (1, STEPS),
        (round_index, 0),
    ]
    assert found[0].epsilon_after == found[1].epsilon_after
    assert not (tmp_path / KEY).exists()


def test_kept_private_steps_are_what_their_noise_led_to(tmp_path: Path):
    """Those of a round that takes no more of them, bit for bit."""
    with pytest.raises(LeftAtStep):
        PrivateMachine(tmp_path / "one", goes_after=1).fit(1)
    _, arrays = _parsed(memoryview((tmp_path / "one" / KEY).read_bytes()))
    whole = PrivateMachine(tmp_path / "other", steps=1).fit(1)
    np.testing.assert_array_equal(arrays["weights"], whole.weights_d)


def test_a_state_larger_than_any_of_the_model_is_not_read(tmp_path: Path, caplog: Any):
    """Only its size is looked at: it has no bytes on the disk."""
    left(tmp_path)
    with (tmp_path / KEY).open("r+b") as file:
        file.truncate(1 << 40)
    machine = Machine(tmp_path)
    machine.fit()
    assert "it has 1,099,511,627,776 bytes, and at most" in caplog.text
    assert not machine.is_kept()
    # With adaptive moments, the model is there three times.
    assert most_bytes(1 << 40) > 3 << 40
