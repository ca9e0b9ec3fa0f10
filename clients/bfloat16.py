"""Whether a device multiplies matrices in bfloat16 fast.

A processor without instructions for it (AVX2 and no AVX-512, for example) takes 15 to
60 times as long for such a product as for one in float32.
"""

import logging
from typing import Any

import torch

from federation.job.spec import TrainingSpec

_LOG = logging.getLogger(__name__)

_SLOW = (
    'training.precision = "bf16" is slow on this processor, which has no fast matrix '
    'products in bfloat16: "fp32" is probably many times faster here'
)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has fast matrix products in bfloat16."""
    if device.type == "cpu":
        mkldnn: Any = torch.backends.mkldnn
        # What torch itself asks before it hands such a product to oneDNN.
        asks: Any = torch.ops.mkldnn
        return bool(mkldnn.is_available() and asks._is_mkldnn_bf16_supported())  # noqa: SLF001
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def note_slow(training: TrainingSpec, device: torch.device, noted: set[str]) -> None:
    """Warn once if a job trains in bfloat16 where that is slow.

    Args:
        training: States the precision.
        device: Where the site trains.
        noted: What was logged already; the warning is added.
    """
    is_slow = training.precision == "bf16" and not multiplies_bfloat16(device)
    if is_slow and _SLOW not in noted:
        noted.add(_SLOW)
        _LOG.warning("%s", _SLOW)
