"""What a site's codec leaves out of an update, and adds to the next one.

With a residual ``e`` and the update ``delta`` of a round (error feedback: Seide et al.,
Interspeech 2014; with ``beta``: SparseLoCo, arXiv:2508.15706, Algorithm 1)::

    u = delta + beta * e,   q = decode(encode(u)),   e = u - q

The aggregator adds up ``q``, if it counts the answer. If it does not, the site adds
``q`` to ``e`` before its next update: nothing is lost, and nothing counts twice. For
that it keeps the words that it sent beside ``e``, and each task names the newest round
whose update of this site is a part of the model. Words of that round and of earlier
ones are spent.

Shape suffixes: d float values of the model.
"""

from collections.abc import Mapping

import numpy as np

from clients.training.site_state import RESIDUAL, Fact, KeptState
from clients.training.update import Form, prepare
from federation.compression.codec import Links, encoded_over
from federation.errors import CorruptObject
from federation.mapped import give_back, own
from federation.messages import RoundTask
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import NO_ARRAYS, Arrays, Vector, Words, chunks, is_finite

_RESIDUAL, _SENT, _SENT_ROUND = RESIDUAL, "sent", "sent_round"


class ErrorFeedback(Form[Words]):
    """A site's error feedback in one round; if the job has none, it only encodes."""

    def __init__(self, links: Links, task: RoundTask) -> None:
        """Encode the update of a task with the job's codec."""
        self._links = links
        self._task = task
        self._residual_d: Vector | None = None
        self._sent: Words | None = None

    def begin(self, kept: KeptState, weights_d: Vector) -> Vector:
        """Settle what an earlier round left out; see ``Form``.

        Raises:
            CorruptObject: The state does not hold a residual of this model.
        """
        beta, size = self._links.feedback, weights_d.size
        if not beta:
            return weights_d
        self._residual_d = settled(
            kept, self._links, size=size, counted=self._task.counted
        )
        for piece in chunks(size):
            residual_c = self._residual_d[piece]
            residual_c *= np.float32(beta)
            give_back(residual_c)
        return weights_d

    def update(self, weights_d: Vector, result: LocalWeights | LocalUpdate) -> Words:
        """Turn trained weights into the words of the update, in the same memory.

        Raises:
            NotFinite: Training left the finite numbers.
            BeyondCodec: It left those of the codec.
        """
        self._sent = encoded_over(
            self._links.up,
            prepare(weights_d, result),
            residual_d=self._residual_d,
            seed=self._task.round_index,
        )
        return self._sent

    def left(self) -> tuple[Arrays, Mapping[str, Fact]]:
        """Return what the next round needs: arrays and facts of a state."""
        if self._residual_d is None or self._sent is None:
            return NO_ARRAYS, {}
        return (
            {_RESIDUAL: self._residual_d, _SENT: self._sent},
            {_SENT_ROUND: self._task.round_index},
        )


def settled(kept: KeptState, links: Links, *, size: int, counted: int) -> Vector:
    """Return a site's residual, given which of its updates were counted.

    Args:
        kept: The state that its newest round has left; its residual is used up.
        links: The job's codecs.
        size: Values of the model.
        counted: The newest round whose update of the site is a part of the model.

    Returns:
        What was left out, and with it the words that were not counted, shape ``(d,)``.

    Raises:
        CorruptObject: The state does not hold a residual of this model.
    """
    if _RESIDUAL not in kept.arrays:
        return np.zeros(size, np.float32)
    codec = links.up
    kept_d, words = kept.arrays[_RESIDUAL], kept.arrays.get(_SENT)
    sent_round = kept.facts.get(_SENT_ROUND)
    if kept_d.shape != (size,) or kept_d.dtype != np.float32:
        raise _corrupt(f"has a residual of {kept_d.size} values, and the model {size}")
    if not is_finite(kept_d):
        raise _corrupt("has a residual with NaN or infinite values")
    if words is None or type(sent_round) is not int or words.dtype != codec.dtype:
        raise _corrupt(f"has a residual without the words of {codec.name} beside it")
    if fault := codec.fault(words, size):
        raise _corrupt(f"has a residual beside {fault}")
    residual_d = own(kept_d)  # What was read may not be written to otherwise.
    if sent_round > counted:
        values = codec.values(words, size=size, seed=sent_round)
        for piece in chunks(size):
            residual_d[piece] += values[piece]
            give_back(residual_d[piece])
    return residual_d


def _corrupt(fault: str) -> CorruptObject:
    return CorruptObject(
        f"the site's state {fault}: restore its files, or delete them to start afresh "
        "without what earlier updates have left out"
    )
