"""A run's model in the formats of others, each read back by another reader."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.small_jobs import blobs, small_job
from support.without_report import simulate

from clients.data.datasets import as_dataset
from clients.models import hugging_face
from cloud_adapters.storage.disk import transfer
from cloud_adapters.storage.memory import MemoryStore
from deploy.tools import formats, hugging_face_folder
from deploy.tools.export import CARD, export
from deploy.tools.formats import _adapters, _FormatWork, write_format
from federation.errors import JobError, ParityFailed
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder

_LACKS = [
    name
    for name in ("transformers", "peft", "gguf")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_LACKS), reason=f"needs {', '.join(_LACKS)}"),
    pytest.mark.xdist_group("huggingface"),  # Their imports take seconds.
    # peft asks transformers by an old name.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
NO_ONNX = importlib.util.find_spec("onnxruntime") is None

SIZES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {
    **SIZES,
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {**SIZES, "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}


def job_of(config: dict[str, Any] = LLAMA, **options: Any) -> JobSpec:
    """Fine-tuning of a tiny model."""
    return job_file.parse(
        {
            "name": "small",
            "rounds": 1,
            "model": {
                "factory": "clients.models:hugging_face",
                "options": {"config": config, **options},
            },
            "data": {"source": "support.hugging_face:examples"},
            "training": {
                "task": "sft",
                "local_steps": 2,
                "batch_size": 4,
                "optimizer": {"name": "adamw", "lr": 0.1},
            },
            "evaluation": {"every": 0},
            "sites": [{"name": "a"}, {"name": "b"}],
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with adapters."""
    found = RunFolder(tmp_path_factory.mktemp("formats") / "run")
    simulate(job_of(lora={"rank": 4}), folder=found.path)
    return found


def text(store: MemoryStore, key: str) -> str:
    """An object as text."""
    return b"".join(transfer.stream(store, key)).decode()


def test_adapters_are_merged_into_a_folder_of_transformers(run: RunFolder) -> None:
    """The export has checked that it computes the same; the card says so."""
    store = MemoryStore()
    done = export(run, store, kind="huggingface")
    assert {"config.json", "model.safetensors", "job.toml", CARD} <= done.sha256.keys()
    assert "relative error" in done.parity
    assert done.sha256["model.safetensors"] in text(store, CARD)
    assert "lora" not in text(store, "config.json")
    again = export(run, store, kind="huggingface")
    assert (again.bytes_written, again.sha256) == (0, done.sha256)


def test_adapters_leave_alone(run: RunFolder, tmp_path: Path) -> None:
    """They are a small part of the model, and fit on the job's base model."""
    job = job_file.loads(run.read_job())
    made = write_format("adapters", job, run.model, tmp_path, None)
    size = made.files["adapter_model.safetensors"].stat().st_size
    assert size < run.model.stat().st_size / 4
    assert made.parity.error < 1e-6
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


def test_a_prompt_leaves_as_adapters_do(tmp_path: Path) -> None:
    """It is read into the base model, whose head a prompt does not change."""
    job = job_of(GPT2, prompt={"tokens": 3})
    run = RunFolder(tmp_path / "run")
    simulate(job, folder=run.path)
    made = write_format("adapters", job, run.model, tmp_path / "prompt", None)
    assert made.parity.error < 1e-6
    found = json.loads((tmp_path / "prompt" / "adapter_config.json").read_text())
    assert (found["peft_type"], found["num_virtual_tokens"]) == ("PROMPT_TUNING", 3)
    with pytest.raises(JobError, match=r"a prompt .*export adapters"):
        write_format("huggingface", job, run.model, tmp_path, None)


@pytest.mark.parametrize(
    ("kind", "least"), [("gguf", 1e-5), ("gguf-q8", 1e-3), ("gguf-q4", 2e-2)]
)
def test_gguf_is_read_back_by_transformers(
    kind: str, least: float, run: RunFolder, tmp_path: Path
) -> None:
    """What is off is what the types round away."""
    job = job_file.loads(run.read_job())
    made = write_format(kind, job, run.model, tmp_path, None)
    assert least < made.parity.error < made.parity.tolerance
    assert [*made.files] == ["model.gguf"]


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path, run: RunFolder) -> None:
    """With the reason."""
    other = tmp_path / "other"
    simulate(job_of(GPT2), folder=other)
    job = job_of(GPT2)
    model = other / "model.safetensors"
    with pytest.raises(
        JobError, match=r"GPT2LMHeadModel is not a causal .* like Llama"
    ):
        write_format("gguf", job, model, tmp_path, None)
    with pytest.raises(JobError, match="no adapters"):
        write_format("adapters", job, model, tmp_path, None)
    changed = hugging_face(config=GPT2, lora={"method": "fedex"})
    work = _FormatWork(job=job, model=changed, inputs=(), folder=tmp_path)
    with pytest.raises(JobError, match="has changed the weights"):
        _adapters(work)
    small = small_job(num_sites=2)
    simulate(small, folder=tmp_path / "small")
    blob = tmp_path / "small/model.safetensors"
    with pytest.raises(JobError, match="data source with --data"):
        write_format("onnx", small, blob, tmp_path, None)
    data = as_dataset(blobs()[1], name="data")
    with pytest.raises(JobError, match="model of transformers"):
        write_format("huggingface", small, blob, tmp_path, data)


def test_nothing_is_written_if_the_outputs_differ(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because the folder holds a model without its adapters."""
    plain = lambda model: model.get_base_model()  # noqa: E731
    monkeypatch.setattr(hugging_face_folder, "merged", plain)
    monkeypatch.setitem(formats.TOLERANCES, "huggingface", 1e-12)
    store = MemoryStore()
    with pytest.raises(ParityFailed, match="differs from the run's"):
        export(run, store, kind="huggingface")
    assert [*store.list()] == []


@pytest.mark.long
@pytest.mark.skipif(NO_ONNX, reason="needs the extra onnx")
@pytest.mark.parametrize("kind", ["onnx", "onnx-int8", "onnx-int4"])
def test_onnx_takes_any_number_of_records(kind: str, tmp_path: Path) -> None:
    """By ONNX Runtime; the file names no folder of this machine."""
    job, target = small_job(num_sites=2), tmp_path / "made"
    target.mkdir()
    done = simulate(job, folder=tmp_path / "run")
    data = as_dataset(blobs()[1], name="data")
    model = tmp_path / "run/model.safetensors"
    made = write_format(kind, job, model, target, data)
    assert made.parity.error <= made.parity.tolerance
    content = made.files["model.onnx"].read_bytes()
    assert b"/work" not in content
    assert b".py" not in content
    import onnxruntime  # noqa: PLC0415 -- an extra

    session = onnxruntime.InferenceSession(str(made.files["model.onnx"]))
    inputs = blobs(num_train=33)[0].inputs
    (logits,) = session.run(["logits"], {"input": inputs})
    weight, bias = (done.weights[name] for name in sorted(done.weights)[::-1])
    expected = inputs @ np.asarray(weight).T + bias
    np.testing.assert_allclose(logits, expected, atol=1e-5 if kind == "onnx" else 0.1)
    assert load_file(model).keys() == done.weights.keys()
