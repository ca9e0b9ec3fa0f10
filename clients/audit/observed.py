"""A trainer that reports each update to a witness.

For audits: the adversary of record-level privacy sees every update of a site.
"""

from collections.abc import Callable
from typing import Unpack

from clients.training.forwarding import ForwardingTrainer
from federation.errors import SiteError
from federation.protocols import FitArguments, LocalUpdate, LocalWeights, Trainer
from federation.vectors import IntegerVector, Vector

Witness = Callable[[int, Vector, LocalWeights], None]


class ObservedTrainer(ForwardingTrainer):
    """A ``federation.protocols.Trainer`` around another one."""

    def __init__(self, trainer: Trainer, witness: Witness) -> None:
        """Show the witness each round, the weights before it, and what came of them.

        The arrays are the trainer's own and change after the call.
        """
        super().__init__(trainer)
        self._witness = witness

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        **arguments: Unpack[FitArguments],
    ) -> LocalWeights | LocalUpdate:
        """Train, and report the update to the witness."""
        result = super().fit(weights_d, integers_m, **arguments)
        if not isinstance(result, LocalWeights):
            raise SiteError(
                "a single update with noise meant for the sum cannot be observed"
            )
        self._witness(arguments["round_index"], weights_d, result)
        return result
