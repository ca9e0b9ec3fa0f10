"""When a model is tested for mixing records: once for each way it is used."""

from contextlib import AbstractContextManager

import torch

from clients.randomness import seeded_globally
from federation.tree import Tree, leaves, num_records
from privacy.dp_sgd.probe import Forward, check_records_apart

_Use = tuple[
    bool, tuple[tuple[int, ...], ...], tuple[torch.dtype, ...], tuple[bool, ...]
]


class RecordsApart:
    """Tests the models of one factory before they are used with guarantees.

    Kept beside the factory, since all of its models are built alike.

    Attributes:
        passed: The ways of use that were tested: for gradients or not, shape and type
            of a record, and the mode of every module.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without a test.

        Args:
            device: Where the models live.
        """
        self._device = device
        self.passed: set[_Use] = set()

    def check(
        self,
        model: torch.nn.Module,
        inputs: Tree,
        forward: Forward,
        *,
        gradients: bool,
    ) -> None:
        """Test a model, if none was tested in this mode on records of this shape.

        Args:
            model: As it is about to be used; nothing of it is changed.
            inputs: Of the batch that it is about to be used on. One record has no
                other that it could be mixed with.
            forward: Applies a model to inputs, and perhaps an objective.
            gradients: It is used for gradients, not only for losses.

        Raises:
            JobError: It mixes records.
        """
        if num_records(inputs) < 2:  # noqa: PLR2004 - a record and another one.
            return
        modes = tuple(module.training for module in model.modules())
        parts = tuple(leaves(inputs))
        shapes = tuple(tuple(part.shape[1:]) for part in parts)
        use = (gradients, shapes, tuple(part.dtype for part in parts), modes)
        if use in self.passed:
            return
        check_records_apart(
            model, inputs, forward, draws=self._draws, gradients=gradients
        )
        self.passed.add(use)

    def _draws(self, seed: int) -> AbstractContextManager[object]:
        return seeded_globally(seed, self._device)
