"""What sites that have a round's model are sent of the next one.

Every run has this guest: without changes and sums, it checks that the codec of the way
down can encode the model.
"""

from dataclasses import replace

from federation.compression.change import NO_WORDS, RESIDUAL, digest, settle
from federation.job.spec import JobSpec
from federation.protocols import ModelChange, RunState
from federation.rounds.guest import ServerGuest
from federation.rounds.round_record import RoundRecord
from federation.rounds.round_sums import COMPLETED
from federation.vectors import Vector


class ModelChanges(ServerGuest):
    """Sends a model, its change, or the sum that sites compute it from."""

    def after_step_(self, record: RoundRecord, weights_d: Vector) -> None:
        """Make the model what sites compute from the change; see ``ServerGuest``."""
        links, sums, state = record.links, record.sums, record.state
        if links.changes:
            sums.change = settle(
                links,
                state.weights_d,
                weights_d,
                residual_d=state.optimizer.get(RESIDUAL),
                seed=record.round_index,
            )
        elif links.sums and sums.opened_w is not None:
            sums.change = ModelChange(words=sums.opened_w, after=digest(weights_d))
        else:
            links.down.check(weights_d)

    def after_round(self, new_state: RunState, record: RoundRecord) -> RunState:
        """Keep the change until the next round; see ``ServerGuest``."""
        if record.status == COMPLETED:
            return replace(new_state, change=record.sums.change)
        if not record.links.sums:
            return replace(new_state, change=None)
        # Sites that take the server's steps themselves may still have the model.
        unchanged = ModelChange(words=NO_WORDS, after=digest(new_state.weights_d))
        return replace(new_state, change=unchanged)


def begin(job: JobSpec) -> ServerGuest:
    """Begin a run."""
    return ModelChanges(job)
