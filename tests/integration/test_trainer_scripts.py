"""Scripts of transformers' Trainer whose loops train over a federation."""

import importlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_jobs import small_job
from support.without_report import simulate

import crossfed
from clients.data.batches import stepwise
from clients.data.datasets import records_of
from clients.models.model_pool import ModelPool
from clients.training.first_batch import check_first_batches
from deploy.wiring.parts import build_federation
from federation.errors import JobError, QuorumNotMet, SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec

transformers = pytest.importorskip("transformers", reason="needs huggingface")
pytest.importorskip("accelerate", reason="needs the extra huggingface")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("huggingface"),  # Its import takes seconds.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = "support.trainer_script:make_trainer"
STEPS, SIZE = 3, 4
SECURE = {"enabled": True, "clip_norm": 5.0, "max_examples": 100}


def job(*, num_sites: int = 2, rounds: int = 2, **changes: Any) -> JobSpec:
    options = changes.pop("options", {})
    training = {
        "task": "trainer",
        "local_steps": STEPS,
        "batch_size": SIZE,
        "metrics": {"loss": [0.0, 10.0], "hits": [0.0, 1.0]},
        **changes.pop("training", {}),
    }
    return small_job(
        num_sites=num_sites,
        rounds=rounds,
        model={"factory": SCRIPT, "options": options},
        **{"data": {"source": SCRIPT}, "training": training, **changes},
    )


def by_hand(spec: JobSpec) -> tuple[dict[str, torch.Tensor], float]:
    """The same steps in a plain loop: weights, and mean loss on held-out data."""
    from support.trainer_script import collate, make_trainer  # noqa: PLC0415

    federation = build_federation(spec)
    with federation.pool.borrow() as lent:
        module = make_trainer().model
        module.load_state_dict(lent.module.state_dict())
    total = spec.rounds * STEPS

    def factor(step: int) -> float:
        """Two steps of warm-up, then linear: transformers' default."""
        return step / 2 if step < 2 else (total - step) / (total - 2)

    def loss_of(records: list[dict[str, Any]]) -> torch.Tensor:
        out = module(**collate(records))
        return out.loss + 1e-3 * out.logits.square().mean()

    start = {n: t.clone() for n, t in module.state_dict().items()}
    for round_index in range(1, spec.rounds + 1):
        ends = []
        for site, (train, _) in federation.site_data.items():
            module.load_state_dict(start)
            module.train()
            named = dict(module.named_parameters())
            rest = [p for n, p in named.items() if "bias" in n or "ln_" in n]
            decayed = [p for p in named.values() if all(p is not q for q in rest)]
            optimizer = torch.optim.AdamW(
                [{"params": decayed, "weight_decay": 0.1}, {"params": rest}],
                lr=1e-2,
                weight_decay=0.0,
            )
            first = (round_index - 1) * STEPS
            walk = stepwise(
                len(train),
                batch_size=SIZE,
                first_batch=first,
                num_batches=STEPS,
                seed=spec.seed,
                site=site,
            )
            for step, chosen in enumerate(walk, start=first):
                loss_of([*records_of(train, chosen)]).backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 * factor(step)
                optimizer.step()
                optimizer.zero_grad()
            ends.append({n: t.clone() for n, t in module.state_dict().items()})
        start = {n: sum(end[n] for end in ends) / len(ends) for n in start}
    module.load_state_dict(start)
    module.eval()
    losses = []
    for _, held_out in federation.site_data.values():
        records = [*records_of(held_out, np.arange(len(held_out)))]
        losses += [float(loss_of(records).detach())]
    return start, sum(losses) / len(losses)


def test_loss_and_weights_are_those_of_the_same_steps_by_hand():
    spec = job()
    result = simulate(spec)
    wanted, loss = by_hand(spec)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert 0 < result.metrics["hits"] < 1
    for name, values in result.weights.items():
        # Adam scales gradients of rounding errors, as of the keys' biases, up to lr.
        np.testing.assert_allclose(values, wanted[name].numpy(), atol=3e-5)


def test_secure_sums_and_accumulation():
    """A secure sum has the same loss; two batches of two are one of four."""
    halves = {"training": {"batch_size": 2, "accumulate": 2}}
    changed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    kind = {"lr_scheduler_type": "constant", "weight_decay": 0.0}
    plain = simulate(job(num_sites=3, options=kind))
    secure = simulate(
        job(num_sites=3, options=kind, privacy={"secure_aggregation": SECURE})
    )
    assert secure.loss == pytest.approx(plain.loss, rel=1e-3)
    assert secure.metrics["hits"] == pytest.approx(plain.metrics["hits"], abs=0.05)
    split = simulate(job(num_sites=3, options={**kind, **changed}, **halves))
    assert split.loss == pytest.approx(plain.loss, rel=0.02)
    assert split.history[-1]["training_loss"] > 0


def test_bfloat16_and_checkpointing_are_those_of_the_trainer():
    """Autocast changes the loss a little, activations computed again do not."""
    plain = simulate(job(num_sites=1, rounds=1))
    half = simulate(job(num_sites=1, rounds=1, options={"bf16": True}))
    assert half.loss != plain.loss
    assert half.loss == pytest.approx(plain.loss, rel=0.02)
    less = simulate(
        job(num_sites=1, rounds=1, options={"activation_checkpointing": True})
    )
    assert less.loss == pytest.approx(plain.loss, rel=1e-6)


def test_all_held_out_records_are_evaluated():
    """Also those of a last batch that the loop would leave out in training."""
    sums = []
    for options in ({}, {"dataloader_drop_last": True}):
        federation = build_federation(job(options=options))
        site = SiteId("site-0")
        trainer = federation.loop_trainer(site, federation.site_data[site])
        sums.append(trainer.evaluate(*federation.pool.initial_weights(), round_index=1))
    assert sums[0] == sums[1]


def test_updates_of_a_loop_can_be_protected_by_site():
    private = {"unit": "site", "clip_norm": 1.0, "noise_multiplier": 0.5}
    private |= {"target_epsilon": 1e9, "delta": 1e-3, "held_out": "public"}
    private |= {"accept_low_signal": True}
    secure = {"enabled": True, "max_examples": 100, "ring_bits": 32}
    result = simulate(
        job(
            num_sites=3,
            rounds=1,
            aggregation={"weights": "uniform"},
            privacy={"differential_privacy": private, "secure_aggregation": secure},
        )
    )
    assert result.status == "completed"
    assert math.isfinite(result.loss or math.nan)


def test_a_loop_prints_nothing_and_ends_early(capsys: pytest.CaptureFixture[str]):
    """And its Trainer is as it was for the next round."""
    federation = build_federation(job())
    site = SiteId("site-0")
    trainer = federation.loop_trainer(site, federation.site_data[site])
    weights_d, integers_m = federation.pool.initial_weights()
    done = trainer.fit(weights_d, integers_m, round_index=1)
    again = trainer.fit(weights_d, integers_m, round_index=1)
    assert np.array_equal(done.weights_d, again.weights_d)
    assert done.num_steps == STEPS
    assert done.training.count == STEPS * SIZE
    trainer.ends_early = lambda: True
    assert trainer.fit(weights_d, integers_m, round_index=1).num_steps == 1
    trainer.evaluate(weights_d, integers_m, round_index=1)
    with pytest.raises(ValueError, match="no noise"):
        trainer.evaluate(weights_d, integers_m, round_index=1, max_loss=1.0)
    assert capsys.readouterr().out == ""


def test_another_task_uses_model_and_data_of_the_trainer():
    """As record-level privacy needs it: in the loop of the job."""
    training = {"task": "sft", "metrics": {}, "local_epochs": 1, "local_steps": None}
    training = {k: v for k, v in training.items() if v is not None}
    spec = small_job(
        num_sites=2,
        model={"factory": SCRIPT},
        data={"source": SCRIPT},
        training={**training, "batch_size": SIZE},
    )
    result = simulate(spec)
    assert result.status == "completed"
    assert 0 <= (result.accuracy or 0) <= 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "lr_scheduler_type",
        ),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"torch_compile": True}, "torch_compile"),
        ({"early": True}, "EarlyStoppingCallback"),
        ({"own_optimizer": True}, "optimizers"),
        ({"chosen": True}, "get_train_dataloader"),
    ],
)
def test_settings_that_do_not_fit_a_round_are_refused(
    options: dict[str, Any], text: str
):
    with pytest.raises(JobError, match=f"its Trainer has .*{text}") as caught:
        ModelPool(job(options=options))
    assert caught.value.key == "model.factory"


def test_a_job_and_its_trainer_must_agree():
    for training in ({"batch_size": 8}, {"accumulate": 2}):
        federation = build_federation(job(training=training))
        with pytest.raises(JobError, match="same value in both"):
            federation.trainer(SiteId("site-0"))
    with pytest.raises(JobError, match=r"needs a transformers\.Trainer"):
        ModelPool(
            small_job(
                training={"task": "trainer", "local_steps": 1},
            )
        )


def test_first_batches_find_what_is_wrong():
    check_first_batches(build_federation(job()))
    wanted = {"metrics": {"loss": [], "precision": []}}
    with pytest.raises(SiteError, match=r"no number 'precision'.* it has loss, hits"):
        check_first_batches(build_federation(job(training=wanted)))
    arrays = job(data={"source": "support.hugging_face:examples"})
    with pytest.raises(SiteError, match="map-style datasets"):
        check_first_batches(build_federation(arrays))
    nothing = job(data={"source": SCRIPT, "options": {"no_data": True}})
    with pytest.raises(SiteError, match="has none as train_dataset"):
        build_federation(nothing)


def test_what_a_script_raises_is_shown_with_its_line():
    broken = job(options={"broken": True}, evaluation={"every": 0})
    with pytest.raises(QuorumNotMet, match=r"trainer_script.py, line \d+"):
        simulate(broken)


def script(tmp_path: Path) -> tuple[str, list[str]]:
    """The script of the page, after its change, and the lines that changed."""
    page = (ROOT / "docs" / "howto" / "trainer.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    text, *_ = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "federation.toml").write_text(text)
    lines = diff.splitlines()
    before = [line for line in lines if line[:1] != "+"]
    assert len(before) <= 60
    after = [line[1:] for line in lines if line[:1] != "-"]
    return "\n".join(after) + "\n", [line for line in lines if line[:1] == "+"]


def test_script_of_the_page_trains_with_ten_changed_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text, changed = script(tmp_path)
    assert len(changed) <= 10
    file = tmp_path / "count_on.py"
    file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    make_trainer = importlib.import_module("count_on").make_trainer
    trainer = crossfed.patch(make_trainer, "federation.toml", rounds=1)
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train()
    assert result.loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=0.05)
    assert result.loss < before
    with pytest.raises(TypeError, match="returned a int"):
        crossfed.patch(lambda: 1, "federation.toml")

    def inside() -> Any:
        return make_trainer()

    with pytest.raises(ValueError, match="top of a file"):
        crossfed.patch(inside, "federation.toml")
