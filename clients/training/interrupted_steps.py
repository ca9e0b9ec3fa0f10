"""The steps of one round that may be interrupted: what is copied, and put back.

Copied are the model's values, buffers that are not part of its state, the states of the
optimiser and of all guests, sums over batches, generators that were drawn from, and how
many steps were taken. Which examples come next follows from that number.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.models import weights
from clients.models.model_pool import ModelPool
from clients.randomness import global_generators
from clients.ranks.peers import Sums
from clients.training.kept_steps import KeptSteps
from clients.training.local_steps import LocalOptimizer
from clients.training.site_state import KeptState
from federation.vectors import AVERAGED, Arrays, Role

_POSITION, _COUNT, _SUMS = "position", "count", "sums"
_WEIGHTS, _INTEGERS = "weights", "integers"
_BUFFER, _GENERATOR = "buffer/", "generator/"


class InterruptedSteps:
    """One round's steps, from the first or from where they were interrupted."""

    def __init__(
        self,
        kept: KeptSteps,
        round_index: int,
        start: Callable[[], str],
        *,
        pool: ModelPool,
        model: torch.nn.Module,
        optimizer: LocalOptimizer,
        seed: int,
    ) -> None:
        """Begin with a model that holds the global weights.

        Args:
            kept: Where the state is kept.
            round_index: Number of the round, from 1.
            start: Computes ``kept_steps.start_digest`` of what training begins with.
            pool: Pool of the model's instances.
            model: It.
            optimizer: Its optimiser.
            seed: What the global generators begin with where the model draws.
        """
        self._kept, self._round_index, self._start = kept, round_index, start
        self._layout, self._model, self._optimizer = pool.layout, model, optimizer
        self._generators = global_generators(pool.device)
        self._drawn = [generator.get_state() for generator in self._generators]
        self._is_seeded = all(g.initial_seed() == seed for g in self._generators)
        self._groups = optimizer.groups_text()
        # A vector has 32 bits a value.
        self._fits = all(
            tensor.dtype != "float64"
            for tensor in pool.layout.tensors
            if tensor.role in AVERAGED | {Role.PERSONAL}
        )

    def __enter__(self) -> None:
        """Begin: the process may wait for the end of a step."""
        self._at_steps = self._kept.steps()
        self._at_steps.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End; a round that is done needs no state any more."""
        if kind is None:
            self._kept.forget()
        self._at_steps.__exit__(None, None, None)

    def resume(self, sums: Sums) -> int:
        """Put a kept state in place, if there is one of this round.

        Returns:
            The number of steps that were taken.
        """
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
        sums.continue_from(found.arrays[_SUMS], int(found.facts[_COUNT]))
        return int(found.facts[_POSITION])

    def after_step(self, before: int, sums: Sums, number: int) -> None:
        """Keep the state if it is time to.

        Args:
            before: Steps of the run before this round.
            sums: Over the batches of steps of this round.
            number: Number of the step that was taken, counted over the run from 0.

        Raises:
            LeftAtStep: The site leaves.
        """
        position = number + 1 - before
        self._kept.after_step(
            self._round_index, self._start, lambda: self._snapshot(position, sums)
        )

    def _snapshot(self, position: int, sums: Sums) -> KeptState | None:
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
        added, count = sums.so_far()
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
