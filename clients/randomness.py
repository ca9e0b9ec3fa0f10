"""Where the randomness of a site comes from: streams named by what they are for.

Every draw is a pure function of the job's seed, the site, the round and a purpose.
Nothing is carried from round to round, so a resumed run draws what an
uninterrupted one would have drawn, on any machine. The generators of
``random`` and of ``numpy.random`` are not looked after: a model or a dataset that
draws from those is not reproducible.

This is the randomness of sampling and simulation, never of keys or of noise that
protects someone. Where records are protected, what models and data draw is a part of
the mechanism: a block gets secret bytes in place of a seed, which are the states that
all global generators begin with.
"""

import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

_Result = TypeVar("_Result")

RandomBytes = Callable[[int], bytes]
Seed = int | bytes
"""A public number; or ``SECRET_BYTES`` that nobody else knows."""

_STATE_WORDS = 624  # 32 bits each: the state of a Mersenne twister
STATE_BYTES = 4 * _STATE_WORDS
SECRET_BYTES = 4 * STATE_BYTES  # For Python, NumPy, and torch on a CPU and a GPU.
_STATE_STARTS = 24  # Bytes before it in a state of torch, which has 64 bits a word.


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


# Holds while a block has seeded torch's global generators, which all threads of a
# process share. Re-entrant for models that build models.
_SEEDED = threading.RLock()


@contextmanager
def seeded_globally(seed: Seed, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators for a block and put them back after it.

    Models draw initial weights and dropout masks from there. Only one thread at a
    time is let in.

    Args:
        seed: Seed of the block. With secret bytes, the generators of ``random`` and
            ``numpy.random`` get states from them too, and keep these: another thread
            may be drawing from them.
        device: Where the block runs; generators of other GPUs do not change.
    """
    generators = global_generators(device)
    with _SEEDED:
        before = [generator.get_state() for generator in generators]
        try:
            if isinstance(seed, int):
                for generator in generators:
                    generator.manual_seed(seed)
            else:
                fill(generators, seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def fill(generators: Iterable[torch.Generator], secret: bytes) -> None:
    """Give generators secret states, and those of ``random`` and ``numpy.random``.

    Of a seed torch's generator of a CPU takes 32 bits, which can be tried out, so all
    of its state is filled. That of a GPU has a key of 64 bits.

    Args:
        generators: Torch's.
        secret: ``SECRET_BYTES``, independent of all data.
    """
    states = np.frombuffer(secret, np.uint32).reshape(-1, _STATE_WORDS)
    random.seed(states[0].tobytes())
    np.random.seed(states[1])  # noqa: NPY002, TID251
    for generator in generators:
        if generator.device.type != "cpu":
            generator.manual_seed(int.from_bytes(states[3, :2].tobytes(), "big"))
            continue
        generator.manual_seed(0)  # The next draw makes new words of the whole state.
        state = generator.get_state()
        end = _STATE_STARTS + 8 * _STATE_WORDS
        state.numpy()[_STATE_STARTS:end].view(np.uint64)[:] = states[2]
        generator.set_state(state)


def all_states() -> str:
    """Where the generators of ``random``, NumPy and torch's of the CPU are."""
    numpys = np.random.get_state()  # noqa: NPY002
    return repr((random.getstate(), numpys)) + repr(torch.get_rng_state().tolist())


class GlobalDraws:
    """Makes what models draw from torch's global generators reproducible.

    All threads share these generators, so work that draws from them runs alone,
    with a seed of its own; work that does not draw runs together with other such
    work. Which is which is found out: the first work of each kind runs alone and is
    watched. Work that begins to draw later is noticed too, and is done again alone.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without knowing anything."""
        self._device = device
        self._condition = threading.Condition()
        self._found: dict[str, bool] = {}
        self._num_together = 0
        self._untouched: list[torch.Tensor] = []

    def run(self, work: Callable[[], _Result], *, kind: str, seed: Seed) -> _Result:
        """Do some work and return what it returns.

        Args:
            work: Depends on nothing but the generators; it may be called twice.
            kind: Work that is expected to draw alike, for example ``train``.
            seed: Seed of this very work; see ``seeded_globally``.
        """
        if self._join(kind):
            try:
                if not isinstance(seed, int):
                    fill([], seed)
                before = self._states()
                result = work()
                drew = _differ(before, self._states())
            finally:
                self._leave()
            if not drew:
                return result
            self._note(kind, drew=True)
            self._wait_for_the_others()
            self._restore()
        self._wait_for_the_others()
        with seeded_globally(seed, self._device):
            if not self._runs_together(kind):
                before = self._states()
                result = work()
                self._note(kind, drew=_differ(before, self._states()))
                return result
        # While this thread waited, another has found that such work does not draw.
        return self.run(work, kind=kind, seed=seed)

    def _runs_together(self, kind: str) -> bool:
        # As soon as one kind draws, no other may disturb it.
        return self._found.get(kind) is False and not any(self._found.values())

    def _join(self, kind: str) -> bool:
        with self._condition:
            together = self._runs_together(kind)
            if together and self._num_together == 0:
                self._untouched = self._states()
            self._num_together += together
            return together

    def _leave(self) -> None:
        with self._condition:
            self._num_together -= 1
            self._condition.notify_all()

    def _wait_for_the_others(self) -> None:
        """Wait for work that is under way; once a kind draws, no more joins it."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._num_together == 0 or not any(self._found.values())
            )

    def _note(self, kind: str, *, drew: bool) -> None:
        if drew:
            self._found[kind] = True
        else:  # Never in place of a True that another thread has written.
            self._found.setdefault(kind, False)

    def _states(self) -> list[torch.Tensor]:
        """States of the generators, of a moment when no block has seeded them."""
        with _SEEDED:
            return [
                generator.get_state() for generator in global_generators(self._device)
            ]

    def _restore(self) -> None:
        """Take back what work has drawn that was not expected to."""
        with _SEEDED:
            for generator, state in zip(
                global_generators(self._device), self._untouched, strict=True
            ):
                generator.set_state(state)


def global_generators(device: torch.device) -> list[torch.Generator]:
    """Global generators that work on a device may draw from."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def _differ(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return not all(map(torch.equal, before, after))
