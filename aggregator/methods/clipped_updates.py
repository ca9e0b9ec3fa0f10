"""A warning that secure aggregation probably clips most updates."""

from federation.job.spec import JobSpec
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.vectors import Vector

_NEARLY = 0.9  # Of the clip norm: no mean of shorter updates comes so near.


class ClippedUpdates(ServerGuest):
    """Warns of a first mean update that only clipped ones in one direction can give.

    Nothing but the opened sum shows it.
    """

    def after_step_(
        self,
        record: RoundRecord,
        weights_d: Vector,  # noqa: ARG002 -- of the seam
    ) -> None:
        """Compare the norm of the first mean update with the clip norm."""
        size, bound = record.sums.update_norm, record.sums.update_clip
        if not record.state.round_index and size and bound and size > _NEARLY * bound:
            record.events.warned(
                f"the mean update has a norm of {size:.3g}, and secure aggregation "
                f"scales every update down to {bound:g}: most are probably larger and "
                "count only in part. Raise privacy.secure_aggregation.clip_norm; or "
                "make updates smaller: normalise inputs and targets, and keep running "
                'statistics at the sites (model.personal = ["*running_*"]). `crossfed '
                "check-job` names the tensor, each site's own log the norm"
            )


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run, unless noise is in its sums: then clipping is meant."""
    is_meant = job.privacy.differential_privacy.in_sum
    return None if is_meant else ClippedUpdates(job)
