"""A language model like Llama in GGUF, the format of llama.cpp.

The file has no tokeniser: the job names none. Programs that take token identifiers can
use it; for text, give llama.cpp's converter the exported folder and your tokeniser.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_adapters.extras import naming_extras
from deploy.tools.hugging_face_folder import quiet
from federation.errors import JobError

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
