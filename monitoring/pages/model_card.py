"""The model card: how a model was made and how good it is, in Markdown.

The sections follow "Model Cards for Model Reporting" (arXiv:1810.03993, section 4) as
far as a run can tell: intended use and ethics are for a person to add. Text of the run
is in code spans, where nothing of it is markup.

Not here: any number that the run keeps at its sites. Under secure aggregation or
differential privacy sizes of data sets are among those.
"""

import copy
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from federation.job import job_digest, job_file
from federation.job.spec import TrainingSpec
from monitoring import privacy_words
from monitoring.terminal import outcome
from monitoring.units import format_bytes, format_count, format_duration
from monitoring.views.run_view import COMPLETED, RunView

_LOAD = """\
```python
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"), strict=False)
```

`model` is what the factory above returns. Tied weights are in the file under one of
their names, which is why `strict=False` is needed."""

_ONNX = """\
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, {session.get_inputs()[0].name: records})
```"""
_GGUF = """\
The file is for llama.cpp. It has no tokeniser: it takes and returns token
identifiers."""
_USE = {
    "huggingface": """\
```python
from transformers import AutoModel  # Or the class that `architectures` names.

model = AutoModel.from_pretrained(
    folder, local_files_only=True, trust_remote_code=False
)
```""",
    "adapters": """\
```python
from peft import PeftModel

model = PeftModel.from_pretrained(base, folder)
```

`base` is the model that `[model]` of `job.toml` describes, without `lora`.""",
    "onnx": _ONNX,
    "onnx-int8": _ONNX,
    "onnx-int4": _ONNX,
    "gguf": _GGUF,
    "gguf-q8": _GGUF,
    "gguf-q4": _GGUF,
}

_NO_PRIVACY = (
    "No differential privacy. The model may reveal which records it was trained on, or "
    "their content: share it only with people who may see the data."
)
_EXHAUSTED = (
    "The run ended early, when the privacy budget of its sites was spent. This is the "
    "last model that it allowed."
)
_HELD_OUT = (
    "The loss and the accuracy are on held-out data of the same sites: they do not "
    "show how well the model works elsewhere."
)
_SIMULATED = (
    "The sites were simulated on one machine: clouds and regions are only names in the "
    "job."
)
_PLACE = ("name", "cloud", "region")  # of a site, in a job file
_OWN_DATA = "Each site trained on data that it chose itself, which never left it."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What is known about the file itself.

    Attributes:
        size: Bytes.
        sha256: SHA-256 of its content, as 64 hexadecimal digits.
        num_tensors: Tensors in it.
        num_values: Values in all of them.
        types: Their types as the format names them, such as ``F32``.
    """

    size: int
    sha256: str
    num_tensors: int
    num_values: int
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """A model in another format than the run's own.

    Attributes:
        format: Its name, such as ``onnx``.
        sha256: Digests of the files by name.
        parity: How far its outputs are from those of the run's model, in words.
    """

    format: str
    sha256: Mapping[str, str]
    parity: str


def model_card(
    view: RunView,
    job_toml: str,
    model: ModelFile,
    converted: ConvertedModel | None = None,
    *,
    site: str = "",
) -> str:
    """Write the card of a run's final model.

    The same run always has the same card.

    Args:
        view: The run, completed or exhausted.
        job_toml: Its resolved job file, as text.
        model: The run's own file.
        converted: What is exported, if it is not that file.
        site: Whose own model it is; empty for that of all sites.
    """
    job = tomllib.loads(job_toml)
    use = _LOAD if converted is None else _USE[converted.format]
    sections = (
        [*_head(view), *_personal(job, site)],
        ["## Model", "", *_table(_model_rows(job, model, converted))],
        ["## Data", "", *_data(view, job)],
        ["## Training", "", *_table(_training_rows(view, job))],
        ["## Evaluation", "", *_evaluation(view)],
        ["## Privacy", "", *_privacy(view), *_uncovered(view, site)],
        ["## Limits", "", *(f"- {limit}" for limit in _limits(view))],
        ["## Use", "", use],
    )
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _head(view: RunView) -> Iterator[str]:
    yield from ("---", "tags:", "- federated-learning")
    if view.privacy is not None:
        yield "- differential-privacy"
    yield from ("---", "", f"# {_code(view.started.job_name)}", "")
    num_sites = format_count(len(view.started.sites), "site")
    yield (
        f"One model, trained over {num_sites} by federated learning: updates of the "
        "model went to an aggregator, and training data stayed at the sites. The whole "
        "job is in `job.toml`."
    )
    if view.status != COMPLETED:
        yield from ("", _EXHAUSTED)


def _personal(job: Mapping[str, Any], site: str) -> Iterator[str]:
    """Say which part of a model with personal parts this is."""
    patterns = job["model"].get("personal", [])
    if not patterns:
        return
    named = ", ".join(_code(pattern) for pattern in patterns)
    whose = (
        f"This is the own model of site {_code(site)}: the part that all sites share, "
        f"with the site's own {named}."
        if site
        else f"This is the part that all sites share. Each site keeps {named}, which "
        "is not in the file: the model is not complete without it."
    )
    yield from ("", f"{whose} Results are over all sites, each with its own model.")


def _uncovered(view: RunView, site: str) -> Iterator[str]:
    if site and view.privacy is not None and view.privacy.unit == "site":
        yield ""
        yield (
            "**Epsilon does not cover the site's own part.** It was trained without "
            "noise: share this file only with people who may see the site's data."
        )


def _model_rows(
    job: Mapping[str, Any], model: ModelFile, converted: ConvertedModel | None
) -> Iterator[tuple[str, str]]:
    if converted is None:
        yield "file", f"`model.safetensors`, {format_bytes(model.size)}"
        yield "SHA-256", _code(model.sha256)
    else:
        yield "format", _code(converted.format)
        for name, digest in converted.sha256.items():
            yield f"SHA-256 of {_code(name)}", _code(digest)
        yield "SHA-256 of the run's model", _code(model.sha256)
        yield "outputs, against the run's model", _plain(converted.parity)
    tensors = format_count(model.num_tensors, "tensor")
    yield "values", f"{model.num_values:,} in {tensors} of {', '.join(model.types)}"
    yield "factory", _code(job["model"]["factory"])
    if job["model"].get("options"):
        yield "options", _code(json.dumps(job["model"]["options"]))


def _data(view: RunView, job: Mapping[str, Any]) -> Iterator[str]:
    heads = ["site", "cloud", "region"]
    places = [[_code(site[head]) for head in _PLACE] for site in job["sites"]]
    if view.is_deployed:
        yield from (*_table(places, heads), "", _OWN_DATA)
        return
    if "data" in job:
        yield from _table([("source", _code(job["data"]["source"]))])
        yield ""
    # Where updates are hidden, the sizes of data sets are the sites' own too.
    is_open = view.privacy is None and not view.is_secret
    if not is_open:
        yield from _table(places, heads)
        yield from ("", "How much each site holds is not reported.")
        return
    heads += ["training examples", "held-out examples"]
    rows = []
    for share in view.data.shares if view.data else ():
        cells = [_code(share.site), _code(share.cloud), _code(share.region)]
        cells += [f"{share.train_examples:,}", f"{share.held_out_examples:,}"]
        rows.append(cells)
    yield from _table(rows, heads)


def _training_rows(view: RunView, job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    started = datetime.fromtimestamp(view.first_started_at, UTC)
    optimizer = job["training"]["optimizer"]
    yield "run", _code(view.started.run_id)
    digest = job_digest.digest(job_file.parse(copy.deepcopy(dict(job)))).hex()
    yield "SHA-256 of the job", _code(digest)
    yield "begun", f"{started:%Y-%m-%d %H:%M} UTC"
    yield "rounds", f"{view.rounds_completed} of {view.started.rounds}"
    if view.selected is not None:
        yield "this model", outcome.chosen(view.selected)
    if view.started.weights:
        yield "started from", _code(view.started.weights)
    yield "duration", format_duration(view.seconds)
    rate = f"learning rate {optimizer['lr']:g}"
    work = _work(job)
    yield "at each site", f"{work} a round of {_code(optimizer['name'])}, {rate}"
    batch = job["training"].get("batch_size", TrainingSpec().batch_size)
    planned = view.privacy
    unit = "person" if planned and planned.unit == "person" else "record"
    yield "batch", format_count(batch, unit) + _batches_of_a_step(job["training"])
    server = job["aggregation"]["server_optimizer"]["name"]
    yield "combined by", f"{_code(job['aggregation']['combine'])}, then {_code(server)}"
    sums = "the aggregator saw only sums" if view.is_secret else "no"
    yield "secure aggregation", sums
    up, down = format_bytes(view.bytes_up), format_bytes(view.bytes_down)
    yield "traffic", f"{up} from the sites, {down} to them"
    if failures := view.totals.num_failures:
        yield "failures", format_count(failures, "task")


def _work(job: Mapping[str, Any]) -> str:
    """A site's work in a round: steps or epochs."""
    training, schedule = job["training"], job.get("schedule", {})
    if schedule.get("local_work") == "auto":
        most = format_count(schedule["max_local_steps"], "step")
        return f"{training['local_steps']} to {most}"
    if "local_steps" in training:
        return format_count(training["local_steps"], "step")
    return format_count(training["local_epochs"], "epoch")


def _batches_of_a_step(training: Mapping[str, Any]) -> str:
    """How many batches a step has, from which rounds on; empty for always one."""
    later = training.get("accumulate_from", [])
    first = training.get("accumulate", TrainingSpec().accumulate)
    if first == 1 and not later:
        return ""
    more = (f", {value} from round {first_round}" for first_round, value in later)
    return "".join([f"; {first} per step", *more])


def _evaluation(view: RunView) -> Iterator[str]:
    rows = [(name, _plain(text)) for name, text in outcome.quality(view)]
    if not rows:
        yield "The model was not evaluated."
        return
    yield from _table(rows)
    if privacy_words.has_noise(view.privacy):
        yield from ("", "A tilde marks a result with noise, +- its standard deviation.")


def _privacy(view: RunView) -> Iterator[str]:
    planned = view.privacy
    if planned is None:
        yield _NO_PRIVACY
        return
    early, total = view.by_results, view.total_spent
    spent = privacy_words.spent(planned, total, by_results=early)
    rows = [("unit", f"{_code(planned.unit)}: {privacy_words.unit(planned)}")]
    rows.append(("epsilon", spent))
    if planned.holds_against:
        rows.append(("holds against", planned.holds_against))
    signal = privacy_words.signal(planned)
    if signal is not None:
        rows.append(("signal", signal))
    yield from _table([(name, _plain(text)) for name, text in rows])
    yield from ("", _plain(privacy_words.meaning(planned, total, by_results=early)))


def _limits(view: RunView) -> Iterator[str]:
    yield _HELD_OUT
    if not view.is_deployed:
        yield _SIMULATED
    if view.privacy is not None:
        yield from (f"Layer replaced: {_code(name)}." for name in view.privacy.replaced)


def _table(
    rows: Iterable[Sequence[str]], heads: Sequence[str] = ("", "")
) -> Iterator[str]:
    for cells in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """A text of ours inside a table: ``~`` would strike through."""
    return " ".join(text.split()).replace("~", "\\~")


def _code(text: str) -> str:
    """A text of the job, unchanged, on one line."""
    shown = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else ""
