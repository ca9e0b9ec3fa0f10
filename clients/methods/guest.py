"""What a method may do in a round at a site: the seam of all local methods.

The corridor of a round (``clients.training.trainer``) is the algorithm: for each batch,
loss, backward, ``gradient_`` of each guest, step, ``after_step_`` of each guest. A
method is a function that takes a ``LocalRound`` and returns its guest, or None if the
job does not use it; ``clients.methods.registry`` lists all of them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from clients.models import weights
from clients.ranks.peers import NO_PEERS, Peers
from federation.errors import SiteError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.rounds.local_work import schedule_step
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Role, Vector

UNSTABLE = (
    "training produced NaN or infinite weights: lower the learning rate, that of "
    "aggregation.server_optimizer included, or set training.clip_grad_norm"
)


class NotFinite(SiteError):
    """Training left the finite numbers."""


@dataclass(frozen=True)
class LocalRound:
    """A round that begins at a site; its model holds the weights to begin with.

    Attributes:
        job: Says which methods are on, and how.
        site: Name of the site.
        round_index: Number of the round, from 1.
        steps: Steps of the round, counted over the run from 0.
        model: Trained in place.
        layout: Places of the model's tensors in the vector of all weights.
        weights_d: The global weights, shape ``(d,)``.
        kept: Arrays that the site has kept of an earlier round.
        lora_rank: Ranks of adapters that the site trains; None for all.
        peers: The site's ranks, which take the same steps.
    """

    job: JobSpec
    site: SiteId
    round_index: int
    steps: range
    model: torch.nn.Module
    layout: Layout
    weights_d: Vector
    kept: Arrays
    lora_rank: int | None = None
    peers: Peers = NO_PEERS

    def place(self, number: int) -> int:
        """Find a step's place in the schedule of the rate; see ``schedule_step``."""
        return schedule_step(self.job, self.round_index, self.steps, number)

    @cached_property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by their names in the layout, tied ones once."""
        by_name = weights.parameters_by_name(self.model)
        first = {parameter: name for name, parameter in reversed(by_name.items())}
        return {n: p for n, p in by_name.items() if p.requires_grad and first[p] == n}

    @cached_property
    def shared(self) -> dict[str, torch.nn.Parameter]:
        """Those of them that sites share."""
        roles = {t.name: t.role for t in self.layout.tensors}
        wanted = Role.PARAMETER
        return {n: p for n, p in self.trained.items() if roles.get(n) is wanted}

    @cached_property
    def anchor(self) -> list[torch.Tensor]:
        """Copies of the trained parameters as the round began, in their order."""
        return [p.detach().clone() for p in self.trained.values()]

    def parts(self, vector_d: Vector) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return each trained parameter with its part of a vector, in its type.

        Args:
            vector_d: Values by the model's layout, shape ``(d,)``. Parts may be views.
        """
        places, found = {t.name: t for t in self.layout.tensors}, []
        for name, parameter in self.shared.items():
            tensor = places[name]
            part = vector_d[tensor.offset : tensor.offset + tensor.size]
            values = torch.from_numpy(part.reshape(tensor.shape))
            found.append((parameter, values.to(parameter)))
        return found


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient: zeros if no batch of the step has used it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class Guest:
    """A method in one round at a site. By default it does nothing.

    Attributes:
        skipped: Steps of the round that were not taken because of it.
    """

    skipped: int = 0

    def loss_(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of which gradients are to be taken."""
        return loss

    def gradient_(self) -> bool | None:
        """Change the gradients of a step, before they are clipped.

        Returns:
            False if the step must not be taken; no later guest sees its gradients then.
        """

    def after_step_(self) -> None:
        """Change the parameters after a step."""

    def end_(self, num_steps: int) -> None:
        """Change the parameters after all steps of the round.

        Args:
            num_steps: Steps that were taken.
        """

    def arrays(
        self,
        local_d: Vector,  # noqa: ARG002 -- of the seam
        local_m: IntegerVector,  # noqa: ARG002 -- of the seam
    ) -> Arrays:
        """Return what the next round begins with.

        Args:
            local_d: The site's weights after its steps, shape ``(d,)``.
            local_m: Its integer values after them, shape ``(m,)``.
        """
        return NO_ARRAYS

    def state(self) -> Arrays:
        """Return what ``restore`` continues an interrupted round from.

        Not what a guest has of the round's beginning, which is there again then.
        """
        return NO_ARRAYS

    def restore(self, state: Arrays) -> None:
        """Put the ``state`` of the same round in place; it has that of others too."""
