"""The formats that a run's model can leave in, each checked before it is written.

Every format but the run's own file is read back by another reader where there is one,
and its outputs are compared with those of the run's model (``deploy.tools.parity``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.data.datasets import Dataset
from clients.models.adapters import without_cut
from clients.models.trained import trained_model
from clients.models.weights import exact_factors
from clients.training.predictions import model_misfit
from cloud_adapters.extras import naming_extras
from deploy.tools import hugging_face_folder as folders, onnx_file
from deploy.tools.hugging_face_folder import quiet
from deploy.tools.parity import Parity, check_parity, outputs_of
from federation.errors import FederationError, JobError
from federation.job.spec import JobSpec
from federation.tree import Tree, leaves, map_tree

FILE = "model.gguf"
# Classes of transformers whose layers are those of GGUF's architecture "llama".
_LIKE_LLAMA = ("llama", "mistral")
# Values with one scale, of both types with few bits.
_BLOCK = 32
# Every token goes through these, so their errors count most.
_OF_TOKENS = ("token_embd", "output.")
_QUERY, _KEY = "self_attn.q_proj.weight", "self_attn.k_proj.weight"


def write_gguf(model: torch.nn.Module, folder: Path, *, kind: str = "f16") -> Path:
    """Write a model of transformers, without adapters.

    Args:
        model: Its weights in any type.
        folder: Where to.
        kind: Type of matrices: ``f16``; ``q8_0`` or ``q4_0``: 8 or 4 bits in blocks of
            32, each with a scale in float16. With 4 bits, embeddings and the output
            layer have 8. Vectors, and matrices whose rows are no whole blocks, are
            float32 and float16.

    Returns:
        The file.

    Raises:
        JobError: The model is not like Llama; the message has the reason.
        MissingExtra: gguf is not installed.
    """
    with naming_extras():
        import gguf  # noqa: PLC0415 -- an extra
    config = _config(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    path = folder / FILE
    writer = gguf.GGUFWriter(str(path), "llama")
    try:
        _add_settings(gguf, writer, config, kind)
        for name, tensor in model.state_dict().items():
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if place is None:
                raise JobError(
                    f"GGUF has no place for {name!r}: export huggingface or onnx",
                    key="--format",
                )
            values = _permuted(name, tensor.detach().cpu().float().numpy(), config)
            _add_tensor(gguf, writer, place, values, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def read_gguf(path: Path) -> torch.nn.Module:
    """Read a file with the reader of transformers, which shares no code with this."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 -- an extra

    quiet()
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        local_files_only=True,
        trust_remote_code=False,
    )
    return model.eval()  # type: ignore[no-any-return]


def _config(model: torch.nn.Module) -> Any:
    """The configuration, if the model is like Llama.

    Raises:
        JobError: It is not.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    reason = ""
    if kind not in _LIKE_LLAMA or not type(model).__name__.endswith("ForCausalLM"):
        reason = f"a {type(model).__name__} is not a causal language model like Llama"
    elif (config.rope_parameters or {}).get("rope_type", "default") != "default":
        reason = "its rotary positions are scaled"
    elif config.hidden_act != "silu":
        reason = f"it computes {config.hidden_act} and not silu"
    elif getattr(config, "sliding_window", None):
        reason = "its attention has a sliding window"
    elif getattr(config, "attention_bias", False):
        reason = "its attention has biases"
    if reason:
        raise JobError(
            f"GGUF cannot be written: {reason}. Export huggingface or onnx",
            key="--format",
        )
    return config


def _add_settings(gguf: Any, writer: Any, config: Any, kind: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind.upper()}"))


def _head_size(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _permuted(
    name: str, values: NDArray[np.float32], config: Any
) -> NDArray[np.float32]:
    """Order the rows of queries and keys as llama.cpp rotates them.

    transformers rotates the first half of a head against the second half, llama.cpp
    neighbours against each other.
    """
    if not name.endswith((_QUERY, _KEY)):
        return values
    is_key = name.endswith(_KEY)
    heads = config.num_key_value_heads if is_key else config.num_attention_heads
    parts = values.reshape(heads, 2, -1, values.shape[1])
    return parts.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(
    gguf: Any, writer: Any, name: str, values: NDArray[np.float32], kind: str
) -> None:
    if kind == "q4_0" and name.startswith(_OF_TOKENS):
        kind = "q8_0"
    if values.ndim == 1:
        writer.add_tensor(name, values)
    elif kind == "f16" or values.shape[-1] % _BLOCK:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        few_bits = gguf.GGMLQuantizationType[kind.upper()]
        packed = gguf.quants.quantize(values, few_bits)
        writer.add_tensor(name, packed, raw_dtype=few_bits)


SAFETENSORS = "safetensors"
# Largest relative error of the outputs.
TOLERANCES: Mapping[str, float] = {
    "huggingface": 1e-4,
    "adapters": 1e-5,
    "onnx": 1e-4,
    "onnx-int8": 0.1,
    "onnx-int4": 0.25,
    "gguf": 5e-3,
    "gguf-q8": 3e-2,
    "gguf-q4": 0.35,
}
# Weights in bfloat16 have 8 significant bits, and are rounded again when merged.
_BFLOAT16_TOLERANCE = 3e-2
_RECORDS, _TOKENS = 16, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFiles:
    """A model in a format.

    Attributes:
        files: By the name in the export; all lie in the folder that was given.
        parity: How far its outputs are from those of the run's model.
    """

    files: Mapping[str, Path]
    parity: Parity


@dataclass(frozen=True, slots=True, kw_only=True)
class _FormatWork:
    """What a format is made from."""

    job: JobSpec
    model: torch.nn.Module
    inputs: Tree
    folder: Path


def write_format(
    kind: str, job: JobSpec, model_file: Path, folder: Path, data: Dataset | None
) -> FormatFiles:
    """Write a run's model in a format, and compare what it computes.

    Args:
        kind: One of ``TOLERANCES``.
        job: The run's job.
        model_file: Its ``model.safetensors``.
        folder: An empty folder.
        data: Records to compare the outputs of; without them, language models get
            random tokens.

    Raises:
        JobError: The format does not fit the model, or it needs records.
        ParityFailed: The outputs differ by more than the format's tolerance.
        MissingExtra: A package of the format is not installed.
    """
    pool, model = trained_model(job, model_file)
    model.to("cpu")
    if data is None:
        inputs = _random_tokens(model)
    else:
        inputs = records_of(model, data, task=job.training.task)
    work = _FormatWork(job=job, model=model, inputs=inputs, folder=folder)
    reference = reference_outputs(model, inputs)
    found = _WRITERS[kind](work)
    tolerance = TOLERANCES[kind]
    if any(spec.dtype == "bfloat16" for spec in pool.layout.tensors):
        tolerance = max(tolerance, _BFLOAT16_TOLERANCE)
    parity = check_parity(reference, found, tolerance=tolerance)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return FormatFiles(
        files={path.relative_to(folder).as_posix(): path for path in files},
        parity=parity,
    )


def reference_outputs(model: torch.nn.Module, inputs: Tree) -> list[torch.Tensor]:
    """Outputs of the run's model.

    Raises:
        SiteError: It does not take these records.
    """
    try:
        return outputs_of(model, inputs)
    except FederationError:
        raise
    except Exception as error:
        # A model may raise anything. This translates and does not continue.
        raise model_misfit(error) from error


def records_of(model: torch.nn.Module, data: Dataset, *, task: str) -> Tree:
    """The first records of a dataset, as the task gives them to the model.

    Args:
        model: The run's model.
        data: At least two records.
        task: Task of the job.

    Raises:
        JobError: There are fewer.
    """
    inputs, targets = data.batch(np.arange(min(_RECORDS, len(data))))
    if len(next(leaves(inputs))) < 2:  # noqa: PLR2004
        raise JobError("needs two records or more", key="--data")
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare and isinstance(inputs, Mapping) and isinstance(targets, torch.Tensor):
        # Sequence to sequence: the decoder's inputs are made of the labels.
        given = {"decoder_input_ids": prepare(targets)}
        inputs = {**given, **inputs}
    if task == "ranking" and isinstance(inputs, tuple | list):
        inputs = inputs[0]  # The model scores one record of a pair at a time.
    if task == "causal_lm" and isinstance(inputs, torch.Tensor):
        inputs = inputs[:, :-1]  # The last token of a window is only predicted.
    return map_tree(lambda part: part.cpu(), inputs)


def _random_tokens(model: torch.nn.Module) -> Tree:
    """Tokens that a language model of transformers takes.

    Raises:
        JobError: It is not one.
    """
    model = without_cut(model) or model
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    main_input = getattr(model, "main_input_name", "")
    if main_input != "input_ids" or not vocabulary:
        raise JobError(
            "this format is checked on records: name a data source with --data, or "
            "--data job for that of the run's job",
            key="--data",
        )
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (_RECORDS, _TOKENS), generator=draw)
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens
    return found


def _hugging_face(work: _FormatWork) -> list[torch.Tensor]:
    model = folders.merged(work.model)
    folders.write_folder(model, work.folder)
    return outputs_of(folders.read_folder(type(model), work.folder), work.inputs)


def _adapters(work: _FormatWork) -> list[torch.Tensor]:
    is_prompt = without_cut(work.model) is not None
    if not is_prompt and not folders.has_adapters(work.model):
        raise JobError(
            "the run's model has no adapters: export safetensors, or huggingface if it "
            "is a model of transformers",
            key="--format",
        )
    if any(not each.refactored for each in exact_factors(work.model)):
        raise JobError(
            'method = "fedex" has changed the weights beside the adapters, which these '
            "would leave behind: export huggingface",
            key="--format",
        )
    folders.write_folder(work.model, work.folder)
    return outputs_of(folders.read_adapters(work.job, work.folder), work.inputs)


def _onnx(kind: str) -> Callable[[_FormatWork], list[torch.Tensor]]:
    def write(work: _FormatWork) -> list[torch.Tensor]:
        model = work.model
        if folders.has_adapters(model):
            model = folders.merged(model)
        task = work.job.training.task
        path = onnx_file.write_onnx(
            model, work.inputs, work.folder, task=task, kind=kind
        )
        return [torch.from_numpy(a) for a in onnx_file.run_onnx(path, work.inputs)]

    return write


def _gguf(kind: str) -> Callable[[_FormatWork], list[torch.Tensor]]:
    def write(work: _FormatWork) -> list[torch.Tensor]:
        path = write_gguf(folders.merged(work.model), work.folder, kind=kind)
        return outputs_of(read_gguf(path), work.inputs)

    return write


_WRITERS: Mapping[str, Callable[[_FormatWork], list[torch.Tensor]]] = {
    "huggingface": _hugging_face,
    "adapters": _adapters,
    "onnx": _onnx("exact"),
    "onnx-int8": _onnx("int8"),
    "onnx-int4": _onnx("int4"),
    "gguf": _gguf("f16"),
    "gguf-q8": _gguf("q8_0"),
    "gguf-q4": _gguf("q4_0"),
}
