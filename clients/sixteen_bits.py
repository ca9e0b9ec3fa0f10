"""Whether a device multiplies matrices in 16 bits fast.

A processor without instructions for it (AVX2 and no AVX-512, for example) takes 15 to
60 times as long for such a product as for one in float32.
"""

import logging
import threading
from typing import Any

import torch

from federation.job.spec import TrainingSpec

_LOG = logging.getLogger(__name__)
# Sites of a simulation begin in several threads.
_LOCK = threading.Lock()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has fast matrix products in bfloat16."""
    if device.type == "cpu":
        return _on_cpu("_is_mkldnn_bf16_supported")
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def multiplies_float16(device: torch.device) -> bool:
    """Whether a device has fast matrix products in float16."""
    return device.type != "cpu" or _on_cpu("_is_mkldnn_fp16_supported")


def note_slow(training: TrainingSpec, device: torch.device, noted: set[str]) -> None:
    """Warn once if a job trains in 16 bits where that is slow.

    Args:
        training: States the precision.
        device: Where the site trains.
        noted: What was logged already; the warning is added.
    """
    is_fast = {"bf16": multiplies_bfloat16, "fp16": multiplies_float16}
    ask = is_fast.get(training.precision)
    text = (
        f'training.precision = "{training.precision}" is slow on this processor, which '
        'has no fast matrix products in 16 bits: "fp32" is probably many times faster '
        "here"
    )
    if ask is None or ask(device):
        return
    with _LOCK:
        is_new = text not in noted
        noted.add(text)
    if is_new:
        _LOG.warning("%s", text)


def _on_cpu(question: str) -> bool:
    """Ask oneDNN what torch itself asks before it hands over such a product."""
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available() and getattr(torch.ops.mkldnn, question)())
