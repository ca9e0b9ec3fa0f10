"""Whose updates are a part of the model, where what sites keep depends on it."""

from dataclasses import replace

from federation.job.spec import JobSpec
from federation.methods.registry import follows_counted
from federation.protocols import RunState
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED


class Counted(ServerGuest):
    """Notes of each site the newest round whose update counted."""

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Note the sites of a completed round; see ``ServerGuest``."""
        if record.status != COMPLETED:
            return new_state
        counted = {**new_state.counted, **record.counted}
        if follows_counted(self.job):  # A round of these needs all sites.
            counted = dict.fromkeys(record.cohort, record.round_index)
        return replace(new_state, counted=counted)


def begin(job: JobSpec) -> ServerGuest | None:
    """Begin a run whose sites keep what only an update that counts may change."""
    is_on = follows_counted(job) or job.communication.links.feedback
    return Counted(job) if is_on else None
