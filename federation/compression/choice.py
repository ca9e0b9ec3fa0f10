"""Which codec a job names, and with what numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from federation.compression import blocks, subset, top_k
from federation.compression.codec import BF16, FP16, IDENTITY, Codec

MAX_BLOCK = 1 << 16  # So that a place in a block has at most 16 bits.
ORDERS = (subset.RANDOM, subset.CYCLIC)
# What is left out waits for many rounds, and ages: SparseLoCo, arXiv:2508.15706.
_SPARSE_FEEDBACK = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecOptions:
    """What a job says of a codec; None for what it leaves to the codec.

    Attributes:
        block: Values of a block.
        fraction: Share of the values that is sent.
        order: How blocks are chosen.
        feedback: Share of the residual that is added to the next vector.
    """

    block: int | None = None
    fraction: float | None = None
    order: str | None = None
    feedback: float | None = None


@dataclass(frozen=True, slots=True)
class _CodecForm:
    """A codec of the job file.

    Attributes:
        make: Makes it.
        defaults: The options that it has, with their defaults.
    """

    make: Callable[..., Codec]
    defaults: Mapping[str, object]


def _fixed(codec: Codec) -> _CodecForm:
    return _CodecForm(lambda: codec, {})


def _block(name: str) -> _CodecForm:
    return _CodecForm(
        lambda *, block: blocks.block_codec(name, block),
        {"block": blocks.DEFAULT_BLOCK, "feedback": 1.0},
    )


_FORMS: Mapping[str, _CodecForm] = {
    "identity": _fixed(IDENTITY),
    "bf16": _CodecForm(lambda: BF16, {"feedback": 0.0}),
    "fp16": _CodecForm(lambda: FP16, {"feedback": 0.0}),
    **{name: _block(name) for name in ("int8", "int4", "fp4")},
    "top_k": _CodecForm(
        top_k.top_k_codec,
        {
            "block": top_k.DEFAULT_BLOCK,
            "fraction": top_k.DEFAULT_FRACTION,
            "feedback": _SPARSE_FEEDBACK,
        },
    ),
    "subset": _CodecForm(
        subset.Subset,
        {
            "block": subset.DEFAULT_BLOCK,
            "fraction": subset.DEFAULT_FRACTION,
            "order": subset.RANDOM,
            "feedback": _SPARSE_FEEDBACK,
        },
    ),
}
NAMES = tuple(_FORMS)
# Codecs whose words stand for values near those of any vector, also of a whole model.
FOR_MODELS = frozenset({"identity", "bf16", "fp16"})


def unused(name: str, options: CodecOptions) -> str:
    """Name an option that is given and that the codec does not have; empty if none."""
    given = [each for each in _OPTIONS if getattr(options, each) is not None]
    return next((each for each in given if each not in _FORMS[name].defaults), "")


def codec_of(name: str, options: CodecOptions | None = None) -> Codec:
    """Return the codec with a name of the job file."""
    numbers = _numbers(name, options or CodecOptions())
    numbers.pop("feedback", None)
    return _FORMS[name].make(**numbers)


def feedback_of(name: str, options: CodecOptions | None = None) -> float:
    """Return the share of the residual that is added to the next vector."""
    found = _numbers(name, options or CodecOptions()).get("feedback", 0.0)
    return float(found)  # type: ignore[arg-type]


_OPTIONS = ("block", "fraction", "order", "feedback")


def _numbers(name: str, options: CodecOptions) -> dict[str, object]:
    """Options of a codec, with its defaults for what is not given."""
    return {
        each: default if (given := getattr(options, each)) is None else given
        for each, default in _FORMS[name].defaults.items()
    }
