"""Types of machines as Compute Engine describes them, without the memory of GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from cloud_adapters.compute.machine_types import MachineType

# GiB of one GPU. Source: Google Cloud documentation, "GPU machine types", 2026.
_GPU_MEMORY_GB: Mapping[str, float] = {
    "nvidia-a100-80gb": 80,
    "nvidia-b200": 180,
    "nvidia-h100-80gb": 80,
    "nvidia-h100-mega-80gb": 80,
    "nvidia-h200-141gb": 141,
    "nvidia-l4": 24,
    "nvidia-tesla-a100": 40,
    "nvidia-tesla-t4": 16,
    "nvidia-tesla-v100": 16,
}


def machine_type(described: Any, zones: Sequence[str]) -> MachineType:
    """Translate a type that some zones have."""
    accelerators = described.accelerators
    gpu = accelerators[0].guest_accelerator_type if accelerators else ""
    return MachineType(
        name=described.name,
        gpus=sum(each.guest_accelerator_count for each in accelerators),
        gpu=gpu,
        gpu_memory_gb=float(_GPU_MEMORY_GB.get(gpu, 0)),
        cpus=described.guest_cpus,
        memory_gb=described.memory_mb / 1024,
        zones=sorted(zones),
    )
