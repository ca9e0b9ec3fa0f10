"""The global model as a site receives it: whole, or as a change.

Shape suffixes: d float values of the model.
"""

import numpy as np

from federation.compression import change
from federation.compression.codec import Codec, Links, decoded
from federation.errors import ProtocolError
from federation.messages import RoundTask
from federation.vectors import Vector
from privacy.secagg.errors import NotSetUp


class HeldModel:
    """Decodes a task's model; keeps it if the next task sends only changes.

    It is only in memory: a restarted site receives the whole model again.
    """

    def __init__(self, links: Links) -> None:
        """Hold nothing yet."""
        self._links = links
        self._held_d: Vector | None = None
        self._digest = ""  # Of what is held, if it was made of changes.

    def receive(self, task: RoundTask) -> Vector:
        """Return the float values of the task's model.

        Raises:
            ProtocolError: They come in words of another codec.
            NotSetUp: The model that changed is not here.
        """
        weights_d = self._changed(task) if task.changed_to else self.whole(task)
        if self._links.changes:
            if not task.changed_to:  # Its memory is its sender's after the round.
                weights_d = weights_d.copy()
            self._held_d, self._digest = weights_d, task.changed_to
        return weights_d

    def whole(self, task: RoundTask) -> Vector:
        """Return the float values of a task that carries the whole model.

        Raises:
            ProtocolError: It does not, or they come in words of another codec.
        """
        if task.changed_to:
            raise ProtocolError("was sent what changed in a model, and not a whole one")
        codec = self._links.whole
        _check_type(task, codec)
        return decoded(codec, task.weights_d, seed=task.round_index)

    def _changed(self, task: RoundTask) -> Vector:
        held_d, codec, words = self._held_d, self._links.down, task.weights_d
        if held_d is None:
            raise NotSetUp(
                "no longer has the model that the change applies to, because it was "
                "restarted"
            )
        if self._digest == task.changed_to:  # The same task once more.
            return held_d
        _check_type(task, codec)
        if words.shape != (codec.num_words(held_d.size),):
            raise ProtocolError(
                f"received a change of {words.size} words for a model of {held_d.size} "
                "values"
            )
        weights_d = change.add(codec, held_d, words, out_d=np.empty_like(held_d))
        if change.digest(weights_d) != task.changed_to:
            self._held_d, self._digest = None, ""
            raise NotSetUp(
                "has a different model than the one that the change applies to"
            )
        return weights_d


def _check_type(task: RoundTask, codec: Codec) -> None:
    if task.weights_d.dtype != codec.dtype:
        raise ProtocolError(
            f"was sent a model of type {task.weights_d.dtype}, and {codec.name} has "
            f"{codec.dtype}: give the site the same job as the run"
        )
