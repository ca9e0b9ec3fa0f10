"""Zeros of a pruned model that stay zero in the aggregator's step.

At the sites it is ``clients.methods.kept_zeros``.
"""

from federation.job.spec import JobSpec
from federation.methods.kept_zeros import KEPT_ZEROS
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.vectors import Role, Vector


class KeptZeros(ServerGuest):
    """Sets parameters to zero where those of the model before are zero."""

    def after_step_(self, record: RoundRecord, weights_d: Vector) -> None:
        """Leave running statistics as they are; see ``ServerGuest``."""
        for (spec, before), (_, after) in zip(
            record.layout.float_views(record.state.weights_d),
            record.layout.float_views(weights_d),
            strict=True,
        ):
            if spec.role is Role.PARAMETER:
                after[before == 0] = 0


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run of a pruned model."""
    return KeptZeros(job) if KEPT_ZEROS.is_on(job) else None
