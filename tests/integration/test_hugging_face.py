"""Models of transformers and adapters of peft, with random weights and no network."""

import importlib
import json
import re
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hugging_face import BERT, GPT2, save_tokenizer
from support.small_jobs import small_job
from support.without_report import simulate

from clients.models import hugging_face, tokenizer
from clients.models.model_pool import ModelPool
from clients.models.objectives import objective_of
from clients.models.pretrained import folder_digest
from clients.training.local_federation import Federation
from deploy.wiring.parts import build_federation
from federation.errors import JobError, SiteError
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.protocols import LocalWeights
from privacy.dp_sgd.clipping import ClippedSum
from privacy.dp_sgd.fit import fit_for_privacy
from privacy.dp_sgd.person_batch import PersonBatch

# Their imports take seconds: in the one worker that runs these tests, not in all.
_MISSING = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("huggingface"),
    pytest.mark.skipif(bool(_MISSING), reason="needs the extra huggingface"),
    # peft asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

SECURE = {
    "enabled": True,
    "clip_norm": 5.0,
    "max_examples": 100,
    "ring_bits": 16,
    "two_sites_waiver": True,
}
ROOT = Path(__file__).parents[2]
HEADER_BYTES = 4096
VIT = {
    "model_type": "vit",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 4,
    "patch_size": 2,
}
FFA, PLAIN = {"rank": 2}, {"rank": 2, "method": "plain"}


def job(*, num_sites: int = 2, rounds: int = 3, **changes: Any) -> JobSpec:
    options = {"config": GPT2, **changes.pop("options", {})}
    training = {
        "task": "sft",
        "local_steps": 4,
        "batch_size": 8,
        "optimizer": {"name": "adam", "lr": 0.02},
        **changes.pop("training", {}),
    }
    return small_job(
        num_sites=num_sites,
        rounds=rounds,
        model={"factory": "clients.models:hugging_face", "options": options},
        **{
            "data": {"source": "support.hugging_face:examples"},
            "training": training,
            **changes,
        },
    )


def test_loss_and_weights_are_those_of_the_same_steps_by_hand():
    """With transformers' own loss, masks and shift, and torch's optimiser."""
    whole = {"batch_size": 32, "local_steps": 3, "optimizer": {"lr": 0.5}}
    result = simulate(job(num_sites=1, rounds=2, training=whole))
    spec = job(num_sites=1)
    pool = ModelPool(spec)
    with pool.borrow() as model:
        model.load(*pool.initial_weights())
        module = model.module
        from support.hugging_face import examples  # noqa: PLC0415

        train, held_out = (
            {name: torch.from_numpy(rows) for name, rows in part.items()}
            for part in examples()
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        module.train()
        for _ in range(6):
            module(**train).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = module.eval()(**held_out).loss.item()
        found = {n: p.detach().numpy().copy() for n, p in module.named_parameters()}
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for name, values in found.items():
        np.testing.assert_allclose(result.weights[name], values, atol=2e-6)


@pytest.mark.parametrize("lora", [None, FFA])
def test_secure_sums_of_gpt2(lora: dict[str, Any] | None):
    """The loss falls; only what is trained travels."""
    options = {} if lora is None else {"lora": lora}
    plain = simulate(job(options=options))
    secure = simulate(job(options=options, privacy={"secure_aggregation": SECURE}))
    assert plain.view.initial is not None
    assert plain.loss is not None
    assert plain.loss < plain.view.initial.pooled.loss
    # Rounding is random, and Adam's first steps enlarge it: 0.3 % at one deviation.
    assert secure.loss == pytest.approx(plain.loss, rel=3e-2)
    values = ModelPool(job(options=options)).num_trained
    for report in secure.view.rounds[-1].reports:
        # 16 bits a value, and the header with its signature.
        assert 0 < report.bytes_up - 2 * values < HEADER_BYTES


def test_bert_predicts_masked_tokens():
    result = simulate(
        job(
            rounds=2,
            options={"auto": "AutoModelForMaskedLM", "config": BERT},
            training={"task": "masked_lm"},
        )
    )
    assert result.view.initial is not None
    assert result.loss is not None
    assert result.loss < result.view.initial.pooled.loss


def test_checkpointing_changes_no_gradient_and_bfloat16_halves_the_model():
    torch.manual_seed(0)
    plain = hugging_face(config=GPT2)
    less = hugging_face(config=GPT2, gradient_checkpointing=True)
    less.load_state_dict(plain.state_dict())
    tokens = torch.arange(8).view(1, 8)
    for model in (plain.train(), less.train()):
        model(tokens, labels=tokens).loss.backward()
    assert less.is_activation_checkpointing
    for one, other in zip(plain.parameters(), less.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    half = hugging_face(config=GPT2, dtype="bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def adapters(module: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Copies of A and B of each layer, by name."""
    named = {n: p.detach().double().clone() for n, p in module.named_parameters()}
    return {
        name: (factor, named[name.replace("lora_A", "lora_B")])
        for name, factor in named.items()
        if "lora_A" in name
    }


def errors_of_the_mean(lora: dict[str, Any]) -> list[float]:
    """Of ``mean(B) mean(A)`` as a product of matrices, relative to ``mean(B A)``."""
    federation: Federation = build_federation(job(num_sites=3, options={"lora": lora}))
    pool = federation.pool
    weights_d, integers_m = pool.initial_weights()
    sites = []
    for number in range(3):
        trainer = federation.trainer(SiteId(f"site-{number}"))
        update = trainer.fit(weights_d, integers_m, round_index=1)
        assert isinstance(update, LocalWeights)
        sites.append(update.weights_d)
    with pool.borrow() as model:
        products = []
        for site_d in sites:
            model.load(site_d, integers_m)
            products.append(adapters(model.module))
        model.load(np.mean(sites, axis=0, dtype=np.float64).astype("f4"), integers_m)
        averaged = adapters(model.module)
    errors = []
    for name, (a, b) in averaged.items():
        exact = sum(site[name][1] @ site[name][0] for site in products) / 3
        assert isinstance(exact, torch.Tensor)
        assert exact.norm() > 0
        errors.append(((b @ a - exact).norm() / exact.norm()).item())
    return errors


def test_ffa_is_the_exact_mean_and_plain_averaging_is_not():
    assert max(errors_of_the_mean(FFA)) < 1e-6
    assert min(errors_of_the_mean(PLAIN)) > 1e-3


@pytest.mark.parametrize("clipping", ["hooks", "ghost"])
@pytest.mark.parametrize("lora", [FFA, PLAIN])
@pytest.mark.parametrize("sizes", [None, [2, 1, 2]])
def test_gradients_of_records_and_persons_are_those_one_by_one(
    sizes: list[int] | None, lora: dict[str, Any], clipping: str
):
    """Below the margin by which they are clipped, to 3e-5 of the clip norm."""
    torch.manual_seed(0)
    model, _ = fit_for_privacy(hugging_face(config=GPT2, lora=lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # They begin at 0, which would hide errors of A.
            torch.nn.init.normal_(parameter.data)
    tokens = torch.randint(0, 16, (5, 9))
    labels = tokens.clone()
    labels[2, :6] = -100
    objective = objective_of(job().training)
    clip_norm = 0.5 if sizes is None else 0.2
    clipped = ClippedSum(model, clip_norm=clip_norm, clipping=clipping, batch_size=5)
    clipped.add_(
        lambda: objective(model, {"input_ids": tokens}, labels).sum_of_means(5),
        5,
        None if sizes is None else PersonBatch(sizes=np.array(sizes), most=2),
    )
    expected, num_clipped = torch.zeros_like(clipped.sum_d), 0
    for one in torch.arange(5).split(sizes or 1):
        model.zero_grad()
        loss = objective(model, {"input_ids": tokens[one]}, labels[one])
        (loss.sum_of_means(len(one)) / len(one)).backward()
        parts = [p.grad.flatten() for p in clipped.parameters.values()]
        gradient = torch.cat(parts).double()
        num_clipped += int(gradient.norm() > clipped._limit)
        expected += gradient * min(1.0, clipped._limit / gradient.norm())
    assert num_clipped > 0
    assert (clipped.sum_d - expected).norm() < 3e-5 * clip_norm


def test_a_prompt_is_all_that_is_trained_and_sent():
    """With the loss of transformers, in the clear and in a secure sum."""
    options = {"prompt": {"tokens": 2}}
    plain = simulate(job(options=options))
    assert plain.view.initial is not None
    assert plain.loss is not None
    assert plain.loss < plain.view.initial.pooled.loss
    values = ModelPool(job(options=options)).num_trained
    assert values == 2 * GPT2["n_embd"]
    for report in plain.view.rounds[-1].reports:
        assert 0 < report.bytes_up - 4 * values < HEADER_BYTES
    secure = simulate(job(options=options, privacy={"secure_aggregation": SECURE}))
    assert secure.loss == pytest.approx(plain.loss, rel=1e-2)
    model = hugging_face(config=GPT2, prompt={"tokens": 2})
    tokens = torch.arange(8).view(1, 8)
    labels = tokens.clone()
    labels[:, :3] = -100
    objective = objective_of(job().training)
    found = objective(model, {"input_ids": tokens}, labels)
    theirs = model.adapted(tokens, labels=labels).loss
    assert found.total.item() / found.count == pytest.approx(theirs.item(), rel=1e-5)


def test_records_that_do_not_fit_a_prompt_are_explained():
    """Padding is not classified, and a record and its prompt have their places."""
    model = hugging_face(config=GPT2, prompt={"tokens": 5})
    assert model(torch.ones(1, 7, dtype=torch.long)).shape == (1, 7, 16)
    with pytest.raises(SiteError, match=r"of 5 tokens .*than the 12"):
        model(torch.ones(1, 8, dtype=torch.long))
    with pytest.raises(IndexError):
        model(torch.full((1, 7), 16))
    config = {**GPT2, "pad_token_id": 0, "num_labels": 2}
    options = {"auto": "AutoModelForSequenceClassification", "prompt": {"tokens": 2}}
    classifier = hugging_face(config=config, **options)
    ids = torch.tensor([[3, 4, 5], [3, 4, 0]])
    with pytest.raises(SiteError, match="pad on the left"):
        classifier(ids, attention_mask=(ids > 0).long())
    assert (
        classifier(ids.flip(1), attention_mask=(ids.flip(1) > 0).long()).shape[1] == 2
    )
    encoder = hugging_face(config={**BERT, "num_labels": 2}, **options)
    assert encoder(ids, attention_mask=(ids > 0).long()).shape == (2, 2)


def test_record_level_privacy_refuses_prompts_which_records_share():
    model, _ = fit_for_privacy(hugging_face(config=GPT2, prompt={"tokens": 2}))
    clipped = ClippedSum(model, clip_norm=0.5, clipping="hooks", batch_size=5)
    objective = objective_of(job().training)
    tokens = torch.zeros((5, 9), dtype=torch.long)
    with pytest.raises(JobError, match=r"prompt_encoder.*must be the records"):
        clipped.add_(
            lambda: objective(model, {"input_ids": tokens}, tokens).sum_of_means(5), 5
        )


def test_record_level_privacy_trains_adapters():
    private = {
        "unit": "record",
        "target_epsilon": 8.0,
        "delta": 1e-5,
        "held_out": "public",
    }
    result = simulate(
        job(
            rounds=1,
            options={"lora": FFA},
            training={"local_steps": 2},
            aggregation={"weights": "uniform"},
            privacy={"differential_privacy": private},
        )
    )
    assert result.status == "completed"


@pytest.mark.parametrize("options", [{"lora": {"rank": 2}}, {"prompt": {"tokens": 2}}])
def test_adapters_show_no_warning_that_users_cannot_mend(options: dict[str, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hugging_face(config=GPT2, **options)


def test_adapters_of_a_billion_values_are_a_few_megabytes():
    """On the meta device; the other half of the claim is in the test of GPT-2."""
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    }
    lora = {"rank": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    with torch.device("meta"):
        model = hugging_face(config=config, lora=lora)
    assert sum(p.numel() for p in model.parameters()) > 1e9
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 16 * 8 * (2048 + 512 + 512 + 2048)
    up, down = 2 * trained, 4 * trained  # 16 bits in the sum, float32 in the model.
    assert up + down + 2 * HEADER_BYTES < 5e6


def test_a_single_target_is_the_name_of_a_layer():
    one, listed = (
        hugging_face(config=GPT2, lora={"rank": 2, "targets": targets})
        for targets in ("c_attn", ["c_attn"])
    )
    trained = [name for name, p in one.named_parameters() if p.requires_grad]
    assert trained
    assert all(".c_attn." in name for name in trained)
    assert one.state_dict().keys() == listed.state_dict().keys()


WORDS = ("the", "a", "cat", "dog", "sat", "ran")


def test_tokenizer_is_in_the_job_and_another_is_refused(tmp_path: Path):
    for folder, words in (("ours", WORDS), ("theirs", WORDS[::-1])):
        save_tokenizer(tmp_path / folder, words)
    digest = folder_digest(tmp_path / "ours", tokenizer=True)

    def with_folder(name: str, sha256: str | None) -> JobSpec:
        options = {"folder": str(tmp_path / name)}
        options |= {} if sha256 is None else {"sha256": sha256}
        data = {"source": "support.hugging_face:sentences", "options": options}
        return job(data=data, rounds=1)

    assert simulate(with_folder("ours", digest)).status == "completed"
    with pytest.raises(JobError, match="the same files") as caught:
        build_federation(with_folder("theirs", digest))
    assert caught.value.key == "data.options.sha256"
    with pytest.raises(JobError, match=f"is missing, and .* is {digest}"):
        build_federation(with_folder("ours", None))
    other = folder_digest(tmp_path / "theirs", tokenizer=True)
    of_site = with_folder("theirs", other)
    named = replace(of_site, model=replace(of_site.model, tokenizers=(digest,)))
    with pytest.raises(JobError, match=f"names {digest}, .* has loaded {other}"):
        build_federation(named)


def test_model_of_a_folder(tmp_path: Path):
    """Its weights are those of the folder; a changed file is another model."""
    torch.manual_seed(0)
    saved = hugging_face(config=GPT2)
    saved.save_pretrained(tmp_path)
    digest = folder_digest(tmp_path, tokenizer=False)
    found = hugging_face(folder=str(tmp_path), sha256=digest)
    for one, other in zip(saved.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(JobError, match="use the same files"):
        hugging_face(folder=str(tmp_path), sha256=digest)


def test_a_new_head_is_drawn_without_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Every site loads the folder, and would print it again; later loads may."""
    hugging_face(config=GPT2).save_pretrained(tmp_path)
    digest = folder_digest(tmp_path, tokenizer=False)
    logging = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    auto = "AutoModelForSequenceClassification"
    hugging_face(auto, folder=str(tmp_path), sha256=digest)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_weights_of_another_model_are_refused_by_their_first_layer(tmp_path: Path):
    """A new head is welcome; a body that the file does not have would be random."""
    hugging_face(config=GPT2).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())

    def load(auto: str = "AutoModelForCausalLM") -> torch.nn.Module:
        sha256 = folder_digest(tmp_path, tokenizer=False)
        return hugging_face(auto, folder=str(tmp_path), sha256=sha256)

    load("AutoModelForSequenceClassification")
    for change, text in (
        ({"n_layer": 2}, r"the file has no 'transformer\.h\.1\.ln_1\.weight'"),
        ({"n_embd": 16}, r"c_attn\.bias' is \[48\] in the model and \[24\] in"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(JobError, match=text) as caught:
            load()
        assert caught.value.key == "model.options.folder"
    path.write_text("[]")  # Not a table, as every reader takes it to be.
    with pytest.raises(JobError, match=r"cannot read .*copy its files again"):
        load()
    path.write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(JobError, match=r"cannot read .*copy its files again"):
        load()


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_damaged_tokenizer_is_one_message(tmp_path: Path, text: str):
    save_tokenizer(tmp_path, ("a", "b"))
    (tmp_path / "tokenizer.json").write_text(text)
    sha256 = folder_digest(tmp_path, tokenizer=True)
    with pytest.raises(JobError, match="cannot read the tokeniser") as caught:
        tokenizer(str(tmp_path), sha256)
    assert str(tmp_path) not in caught.value.outside


def test_code_of_a_folder_is_never_run(tmp_path: Path):
    hugging_face(config=GPT2).save_pretrained(tmp_path)
    config = '{"model_type": "gpt2", "auto_map": {"AutoConfig": "evil.Config"}}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "evil.py").write_text("raise SystemExit")
    digest = folder_digest(tmp_path, tokenizer=False)
    with pytest.raises(JobError, match="auto_map"):
        hugging_face(folder=str(tmp_path), sha256=digest)


@pytest.mark.parametrize(
    "config",
    [
        {"auto_map": {"AutoModelForCausalLM": "evil.M"}},
        {"attribute_map": {"x": "auto_map"}, "x": {"AutoModelForCausalLM": "evil.M"}},
        {"text_config": {"attribute_map": {"x": "auto_map"}}},
        {"parts": [{"auto_map": {}}]},
        {"_attn_implementation_internal": "owner/kernel"},
    ],
)
def test_code_of_a_configuration_is_never_run(config: dict[str, Any]):
    """transformers would ask at the terminal, and run it at a yes."""
    with pytest.raises(JobError, match=r"auto_map|attribute_map|_implementation"):
        hugging_face(config={**GPT2, **config})


def test_no_call_of_transformers_may_ask_at_the_terminal():
    """Without ``trust_remote_code`` it does, if a model has code of its own."""
    root = Path(__file__).resolve().parents[2]
    for package in ("clients", "deploy", "monitoring", "crossfed"):
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text("utf-8")
            for call in re.finditer(r"\b(\w+)\.from_(pretrained|config)\(", text):
                if call[1] in {"PeftModel", "ScriptDirectory"}:
                    continue
                rest = text[call.end() :][:300]
                assert re.search(r"trust_remote_code=False|\*\*local", rest), (
                    f"{path}: {call[0]}"
                )


def test_weights_by_pickle_are_never_read(tmp_path: Path):
    hugging_face(config=GPT2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    digest = folder_digest(tmp_path, tokenizer=False)
    with pytest.raises(JobError, match="transformers cannot read"):
        hugging_face(folder=str(tmp_path), sha256=digest)


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/x.safetensors", "x.bin"])
@pytest.mark.parametrize("by", ["index", "config"])
def test_weights_outside_the_digest_are_never_read(tmp_path: Path, name: str, by: str):
    hugging_face(config=GPT2).save_pretrained(tmp_path / "model")
    named = tmp_path / "model" / name
    named.parent.mkdir(exist_ok=True)
    (tmp_path / "model" / "model.safetensors").rename(named)
    if by == "index":
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
        written = tmp_path / "model" / "model.safetensors.index.json"
        written.write_text(json.dumps(index))
    else:
        written = tmp_path / "model" / "config.json"
        config = json.loads(written.read_text())
        written.write_text(json.dumps({**config, "transformers_weights": name}))
    digest = folder_digest(tmp_path / "model", tokenizer=False)
    with pytest.raises(JobError, match="only safetensors"):
        hugging_face(folder=str(tmp_path / "model"), sha256=digest)


@pytest.mark.parametrize(
    "name",
    [
        "additional_chat_templates/tool.jinja",
        "bpe.codes",
        "config.json",
        "source.spm",
        "spm.model",
        "tokenizer.4.0.0.json",
    ],
)
def test_digest_of_a_tokenizer_covers_what_it_reads(tmp_path: Path, name: str):
    save_tokenizer(tmp_path, WORDS)
    before = folder_digest(tmp_path, tokenizer=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    after = folder_digest(tmp_path, tokenizer=True)
    (tmp_path / "model.safetensors").write_text("")
    assert before != after == folder_digest(tmp_path, tokenizer=True)


def test_digest_of_a_model_covers_the_settings_of_its_adapter(tmp_path: Path):
    hugging_face(config=GPT2).save_pretrained(tmp_path)
    before = folder_digest(tmp_path, tokenizer=False)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 9}')
    assert before != folder_digest(tmp_path, tokenizer=False)


@pytest.mark.parametrize(
    ("options", "key", "text"),
    [
        (
            {"auto": "pipeline", "config": GPT2},
            "model.options.auto",
            "not an AutoModel",
        ),
        ({}, "model.options", "either config or folder"),
        ({"config": {"n_layer": 1}}, "model.options.config.model_type", "is missing"),
        ({"config": {"model_type": "gpt9"}}, "model.options.config", "refuses it"),
        ({"folder": "gpt2"}, "model.options.folder", "never downloaded"),
        (
            {"config": {**GPT2, "attn_implementation": "owner/kernel"}},
            "model.options",
            "attn_implementation names code",
        ),
        (
            {"config": {**GPT2, "attn_implementation": {"text": "owner/kernel"}}},
            "model.options",
            "code of the hub",
        ),
        (
            {"config": {**GPT2, "text_config": {"_attn_implementation": "a/b"}}},
            "model.options",
            "_attn_implementation names code",
        ),
        ({"config": GPT2, "dtype": "int8"}, "model.options.dtype", "use one of"),
        (
            {"config": GPT2, "lora": {"targets": ["q_proj"]}},
            "model.options.lora.targets",
            "no layer 'q_proj'; layers with weights are .*c_attn, c_proj",
        ),
        (  # As a regular expression, it takes twice as long for each letter of a name.
            {"config": GPT2, "lora": {"targets": "(\\w+[.]?)+!"}},
            "model.options.lora.targets",
            "no layer '.*layers with weights are .*c_attn",
        ),
        (
            {"config": GPT2, "lora": {"train": ["ln_f", "scores"]}},
            "model.options.lora.train",
            "there is no layer 'scores'",
        ),
        (
            {"config": GPT2, "lora": {"rnk": 2}},
            "model.options.lora",
            "did you mean rank",
        ),
        (
            {"config": GPT2, "lora": {"method": "mean"}},
            "model.options.lora.method",
            "ffa, plain, fedex, svd",
        ),
        (
            {"config": GPT2, "lora": {"method": "fedex", "targets": ["wte"]}},
            "model.options.lora.targets",
            "name linear layers",
        ),
        (
            {
                "auto": "AutoModelForImageClassification",
                "config": VIT,
                "lora": {"method": "fedex", "targets": ["projection"]},
            },
            "model.options.lora.targets",
            "no linear layer",
        ),
        (
            {"config": {**GPT2, "n_layers": 3}},
            "model.options.config.n_layers",
            "GPT2Config has no 'n_layers', .* did you mean 'n_layer'",
        ),
        (
            {"config": GPT2, "lora": {}, "prompt": {}},
            "model.options",
            "either lora or prompt",
        ),
        (
            {"config": GPT2, "prompt": {"tokens": 0}},
            "model.options.prompt.tokens",
            "at least 1",
        ),
        (
            {"auto": "AutoModelForMaskedLM", "config": BERT, "prompt": {}},
            "model.options.prompt",
            "takes no prompt",
        ),
        (
            {"config": GPT2, "lora": {"dora": True}},
            "model.options.lora.dora",
            "not linear in B",
        ),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], key: str, text: str):
    with pytest.raises(JobError, match=text) as caught:
        hugging_face(**options)
    assert caught.value.key == key


def merged(pool: ModelPool, model_d: Any) -> dict[str, Any]:
    """Weights with their adapters, in float64."""
    views = {s.name: v.astype(np.float64) for s, v in pool.layout.float_views(model_d)}
    products = {f.weight: f.scale * views[f.b] @ views[f.a] for f in pool.exact}
    return {
        f.weight: views[f.weight]
        + (products[f.weight].T if f.transposed else products[f.weight])
        for f in pool.exact
    }


def test_fedex_is_the_mean_of_the_sites_models():
    """Whole rounds: the residual travels down, and only factors go up."""
    spec = job(num_sites=3, rounds=1, options={"lora": {"rank": 2, "method": "fedex"}})
    federation = build_federation(spec)
    pool = federation.pool
    start_d, integers_m = pool.initial_weights()
    whole, total = dict[str, Any](), 0
    for site in federation.site_data:
        done = federation.trainer(site).fit(start_d, integers_m, round_index=1)
        total += done.num_examples
        for name, values in merged(pool, done.weights_d).items():
            whole[name] = whole.get(name, 0) + done.num_examples * values
    result = simulate(spec)
    model_d = np.concatenate(
        [
            result.weights[s.name].reshape(-1)
            for s, _ in pool.layout.float_views(start_d)
        ]
    )
    for name, values in merged(pool, model_d).items():
        np.testing.assert_allclose(values, whole[name] / total, atol=1e-6)
    for report in result.view.rounds[-1].reports:
        assert 0 < report.bytes_up - 4 * pool.num_trained < HEADER_BYTES


def test_svd_trains_and_secure_aggregation_refuses_both():
    lora = {"rank": 2, "method": "svd"}
    result = simulate(job(options={"lora": lora}))
    assert result.view.initial is not None
    assert result.loss is not None
    assert result.loss < result.view.initial.pooled.loss
    for method in ("fedex", "svd"):
        lora = {"rank": 2, "method": method}
        secure = {"secure_aggregation": SECURE}
        with pytest.raises(JobError, match="secure aggregation hides"):
            ModelPool(job(options={"lora": lora}, privacy=secure))


def test_dora_trains_with_plain_averaging():
    result = simulate(job(rounds=1, options={"lora": {**PLAIN, "dora": True}}))
    assert result.status == "completed"


def test_job_of_the_page_trains(tmp_path: Path):
    """Not with the other pages' jobs, since it needs the extra."""
    page = (ROOT / "docs" / "howto" / "hugging-face.md").read_text()
    for kind, name in (("toml", "sft.toml"), ("python", "counting.py")):
        blocks = re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(blocks[0])
    spec = job_file.load(tmp_path / "sft.toml", ["rounds=1"])
    result = simulate(spec)
    assert result.view.initial is not None
    assert result.loss is not None
    assert result.loss < result.view.initial.pooled.loss
