"""The steps of one round that may be interrupted: what is copied, and put back.

Copied are the model's values, buffers that are not part of its state, the states of the
optimiser and of all guests, sums over batches, generators that were drawn from, and how
many steps were taken. Which examples come next follows from that number.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from clients.methods.guest import LocalRound
from clients.models import weights
from clients.ranks.peers import Sums
from clients.training.kept_steps import KeptSteps
from clients.training.local_steps import LocalOptimizer
from clients.training.site_state import KeptState
from federation.vectors import AVERAGED, Arrays, Role

_POSITION, _COUNT, _SUMS = "position", "count", "sums"
_WEIGHTS, _INTEGERS = "weights", "integers"
_BUFFER, _GENERATOR = "buffer/", "generator/"


class LostSteps:
    """One round's steps, of which nothing is kept."""

    def __enter__(self) -> Self:
        """Begin with the first step."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the round's steps."""

    def resume(self) -> int:
        """Put a kept state in place, and return how many steps were taken; 0 here."""
        return 0

    def after_step(self, num_steps: int) -> None:
        """Keep the state after so many steps of the round, if it is time to."""


class InterruptedSteps(LostSteps):
    """One round's steps, from the first or from where they were interrupted."""

    def __init__(
        self,
        kept: KeptSteps,
        round_: LocalRound,
        start: Callable[[], str],
        *,
        optimizer: LocalOptimizer,
        sums: Sums,
        generators: Sequence[torch.Generator],
        seed: int,
    ) -> None:
        """Begin with a model that holds the global weights.

        Args:
            kept: Where the state is kept.
            round_: Names the round and the model that takes its steps.
            start: Computes ``kept_steps.start_digest`` of what training begins with.
            optimizer: Takes the steps.
            sums: Over the batches of the steps.
            generators: The global ones, from which the model draws.
            seed: What they begin with where it does.
        """
        self._kept, self._round_index, self._start = kept, round_.round_index, start
        self._layout, self._model = round_.layout, round_.model
        self._optimizer, self._sums = optimizer, sums
        self._generators = generators
        self._drawn = [generator.get_state() for generator in self._generators]
        self._is_seeded = all(g.initial_seed() == seed for g in self._generators)
        self._groups = optimizer.groups_text()
        # A vector has 32 bits a value.
        self._fits = all(
            tensor.dtype != "float64"
            for tensor in round_.layout.tensors
            if tensor.role in AVERAGED | {Role.PERSONAL}
        )

    def __enter__(self) -> Self:
        """Begin: the process may wait for the end of a step."""
        self._at_steps = self._kept.steps()
        self._at_steps.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End; a round that is done needs no state any more."""
        if kind is None:
            self._kept.forget()
        self._at_steps.__exit__(None, None, None)

    def resume(self) -> int:
        """Put a kept state of this round in place, if any; return its steps."""
        num_floats = self._layout.size + self._layout.num_personal
        size = 4 * num_floats + 8 * self._layout.num_integers
        found = self._kept.begin(self._round_index, self._start, model_bytes=size)
        if found is None:
            return 0
        states = _below(_GENERATOR, found.arrays)
        if states and not (self._is_seeded and len(states) == len(self._generators)):
            return 0  # Draws of another number of GPUs are not those to continue.
        weights.load(
            self._model,
            self._layout,
            found.arrays[_WEIGHTS],
            found.arrays[_INTEGERS],
        )
        buffers = _other_buffers(self._model)
        for name, array in _below(_BUFFER, found.arrays).items():
            buffers[name].copy_(torch.tensor(array))
        self._optimizer.restore(found.arrays)
        for index, generator in enumerate(self._generators if states else ()):
            generator.set_state(torch.tensor(states[str(index)]))
        self._sums.continue_from(found.arrays[_SUMS], int(found.facts[_COUNT]))
        return int(found.facts[_POSITION])

    def after_step(self, num_steps: int) -> None:
        """Keep the state if it is time to.

        Args:
            num_steps: Steps of the round that were taken.

        Raises:
            LeftAtStep: The site leaves.
        """
        self._kept.after_step(
            self._round_index, self._start, lambda: self._snapshot(num_steps)
        )

    def _snapshot(self, position: int) -> KeptState | None:
        now = [generator.get_state() for generator in self._generators]
        has_drawn = not all(map(torch.equal, self._drawn, now))
        if not self._fits or (has_drawn and not self._is_seeded):
            return None  # The latter begins again with a seed; see ``GlobalDraws``.
        # An optimiser of the user's may have state that no array holds.
        if not self._optimizer.is_all_tensors():
            return None
        if self._optimizer.groups_text() != self._groups:
            return None
        values_d, values_m = weights.read(self._model, self._layout)
        added, count = self._sums.so_far()
        arrays: dict[str, NDArray[Any]] = {
            _WEIGHTS: values_d,
            _INTEGERS: values_m,
            _SUMS: added,
            **self._optimizer.state(),
        }
        for name, buffer in _other_buffers(self._model).items():
            arrays[_BUFFER + name] = _array(buffer)
        for index, state in enumerate(now if has_drawn else ()):
            arrays[f"{_GENERATOR}{index}"] = _array(state)
        return KeptState(arrays=arrays, facts={_POSITION: position, _COUNT: count})


def _other_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a model's state leaves out, such as caches and counters."""
    state = model.state_dict()
    return {name: b for name, b in model.named_buffers() if name not in state}


def _below(prefix: str, arrays: Arrays) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _array(value: torch.Tensor) -> NDArray[Any]:
    wide = value.float() if value.dtype is torch.bfloat16 else value
    return np.array(wide.detach().cpu().contiguous().numpy())
