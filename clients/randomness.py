"""Where the randomness of a site comes from: streams named by what they are for.

Every draw is a pure function of the job's seed, the site, the round and a purpose.
Nothing is carried from round to round, so a resumed run draws what an
uninterrupted one would have drawn, on whatever machine.

This is the randomness of sampling and simulation, never of keys or of noise that
protects somebody.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """Make the generator for one purpose.

    Args:
        seed: The job's seed.
        purpose: What it is for, for example ``("shuffle", site, epoch)``.
    """
    return np.random.Generator(np.random.Philox(key=_key(seed, *purpose)))


def torch_seed(seed: int, *purpose: str | int) -> int:
    """Seed of 63 bits for a torch generator that serves one purpose."""
    return _key(seed, *purpose) >> 65


def _key(seed: int, *purpose: str | int) -> int:
    text = "\x00".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


# Holds while a model may draw from torch's global generators, which all threads of
# a process share. Re-entrant for models that build models.
_GLOBAL_GENERATORS = threading.RLock()


@contextmanager
def seeded_globally(seed: int) -> Iterator[None]:
    """Seed torch's global generators for a block and put them back after it.

    Models draw initial weights and dropout masks from there and nowhere else. Only
    one thread at a time is let in.
    """
    with _GLOBAL_GENERATORS:
        # Without devices, fork_rng saves those of CUDA only where it is in use.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.random.manual_seed(seed)
            yield


def global_state(device: torch.device) -> bytes:
    """State of the global generators that a model on ``device`` may draw from."""
    state = torch.random.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        state += torch.cuda.get_rng_state(device).numpy().tobytes()
    return state
