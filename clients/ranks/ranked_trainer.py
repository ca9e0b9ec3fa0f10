"""A trainer whose work is done by the ranks of a site."""

import logging
import threading
from typing import Unpack

from clients.ranks.control import (
    Evaluate,
    EvaluateReply,
    Fit,
    FitReply,
    Message,
    kept_from,
    loss_scale_of,
    metric_sums,
)
from clients.ranks.group import RankGroup, RankLost
from clients.ranks.shared_model import SharedModel
from federation.errors import FederationError, ProtocolError, SiteError
from federation.ids import SiteId
from federation.messages import MetricSums
from federation.protocols import LocalWeights, RoundCharges
from federation.vectors import NO_ARRAYS, Arrays, IntegerVector, Layout, Vector

_LOG = logging.getLogger(__name__)


class RankedTrainer:
    """Drives a group of ranks; see ``federation.protocols.Trainer``.

    A round in which a rank dies is repeated by new ranks, from the same weights:
    its result depends only on its weights, its number and the scale of the loss, which
    the agent keeps. Private steps draw
    fresh keys; nothing of an interrupted attempt leaves the site.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        site: SiteId,
        layout: Layout,
        memory: SharedModel,
        restarts: int,
    ) -> None:
        """Start the ranks, which takes them seconds, and do not wait for them.

        Args:
            group: The ranks; this trainer ends them.
            site: Name of the site.
            layout: Layout of the model.
            memory: What the ranks read weights from; this trainer closes it.
            restarts: How often one piece of work is repeated.

        Raises:
            SiteError: No process can be started.
        """
        self._group = group
        self._site = site
        self._layout = layout
        self._memory = memory
        self._restarts = restarts
        self._lock = threading.Lock()
        group.start()

    def layout(self) -> Layout:
        """Layout of the model."""
        return self._layout

    def pay(self, **_: Unpack[RoundCharges]) -> None:
        """Keep no ledger; see ``clients.privacy.spending`` for a trainer that does."""

    def fit(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,
        steps: range | None = None,
    ) -> LocalWeights:
        """Train from the global weights.

        Raises:
            SiteError: Training failed, or ranks died again and again.
        """
        with self._lock:
            done = self._do(fit_of(round_index, kept, steps), weights_d, integers_m)
            if not isinstance(done, FitReply):
                raise ProtocolError("a rank was asked to train and did something else")
            local_d, local_m = self._memory.read()
        return LocalWeights(
            weights_d=local_d,
            integers_m=local_m,
            num_examples=done.num_examples,
            num_steps=done.num_steps,
            training=None if done.count < 0 else metric_sums(done),
            kept=kept_from(done),
        )

    def evaluate(
        self,
        weights_d: Vector,
        integers_m: IntegerVector,
        *,
        round_index: int,
        kept: Arrays = NO_ARRAYS,  # noqa: ARG002 -- personal parts are refused for ranks
        max_loss: float | None = None,
    ) -> MetricSums:
        """Sums over the held-out data, each prediction's loss clipped, in nats.

        Raises:
            SiteError: Evaluation failed, or ranks died again and again.
        """
        work = Evaluate(round_index=round_index, max_loss=max_loss or 0.0)
        with self._lock:
            done = self._do(work, weights_d, integers_m)
        if not isinstance(done, EvaluateReply):
            raise ProtocolError("a rank was asked to evaluate and did something else")
        return metric_sums(done)

    def spent(self) -> None:
        """Keep no ledger; see ``clients.privacy.spending`` for a trainer that does."""

    def close(self) -> None:
        """End the ranks and release the memory."""
        with self._lock:
            self._group.end()
            self._memory.close()

    def _do(
        self, work: Message, weights_d: Vector, integers_m: IntegerVector
    ) -> Message:
        lost = None
        for attempt in range(1 + self._restarts):
            self._memory.write(weights_d, integers_m)
            try:
                return self._group.ask(work)
            except RankLost as error:
                lost = error
                _LOG.warning(
                    "%s (attempt %d at site %s)", lost, attempt + 1, self._site
                )
                self._group.end()
            except FederationError:
                self._group.end()  # Others may wait for the one that failed.
                raise
        raise SiteError(
            f"{lost}, in all {1 + self._restarts} attempts; the log of site "
            f"{self._site!r} says why"
        )


def fit_of(round_index: int, kept: Arrays, steps: range | None) -> Fit:
    """What ranks are asked to train.

    Args:
        round_index: Number of the round, from 1.
        kept: What the site has kept of an earlier round. Ranks take the scale of the
            loss; a job that keeps more is refused for ranks.
        steps: Local steps of the run; None for the job's number.
    """
    return Fit(
        round_index=round_index,
        num_steps=len(steps) if steps else 0,
        first_step=steps.start if steps else 0,
        loss_scale=loss_scale_of(kept),
    )
