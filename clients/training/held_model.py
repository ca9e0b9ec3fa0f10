"""The global model as a site receives it: whole, as a change, or as a sum.

Shape suffixes: d float values of the model.
"""

from collections.abc import Callable

from federation.compression import change
from federation.compression.codec import Codec, Links, decoded
from federation.compression.fragments import WHOLE, Fragment
from federation.errors import ProtocolError
from federation.messages import RoundTask
from federation.protocols import OptimizerState, ServerOptimizer
from federation.rounds.server_optimizer import take_step
from federation.vectors import Allocate, Layout, Vector, copied, in_memory, place
from privacy.secagg.errors import NotSetUp

_RESTARTED = (
    "no longer has the model that the change applies to, because it was restarted"
)


class HeldModel:
    """Decodes a task's model; keeps it if the next task sends only changes.

    It is in no durable place: a restarted site receives the whole model again.

    Args:
        links: The job's codecs.
        optimizer: The server's, for sites that take its steps themselves.
        layout: Finds the layout of the model.
        allocate: Makes the vectors of what is held.
    """

    def __init__(
        self,
        links: Links,
        *,
        optimizer: ServerOptimizer,
        layout: Callable[[], Layout],
        allocate: Allocate = in_memory,
    ) -> None:
        """Hold nothing yet."""
        self.allocate = allocate
        self._links, self._optimizer, self._layout = links, optimizer, layout
        self._held_d: Vector | None = None
        self._digest = ""  # Of what is held, if it was made of changes.
        self._moments: OptimizerState = {}

    @property
    def takes_sums(self) -> bool:
        """Whether tasks may carry a sum in place of a model."""
        return self._links.sums

    def receive(self, task: RoundTask) -> Vector:
        """Return the float values of the task's model.

        Raises:
            ProtocolError: They come in words of another codec.
            NotSetUp: The model that changed is not here.
        """
        if self._links.sums:
            return self._of_sums(task)
        weights_d = self._changed(task) if task.changed_to else self.whole(task)
        if self._links.changes:
            if not task.changed_to:  # Its memory is its sender's after the round.
                weights_d = copied(weights_d, self.allocate)
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
        if self._links.sums:
            size, found = self._layout().size, task.weights_d.size
            if not found or found % size:  # The optimiser's state may follow.
                raise ProtocolError(f"was sent {found} values for a model of {size}")
            return task.weights_d[:size]
        return decoded(codec, task.weights_d, seed=task.round_index)

    def follow(
        self, task: RoundTask, mean_f: Vector, fragment: Fragment = WHOLE
    ) -> Vector:
        """Take the server's step from the model that is held.

        Args:
            task: Names the model that follows.
            mean_f: Mean of the updates of a fragment, shape ``(f,)``; overwritten.
            fragment: Which one.

        Returns:
            The model that follows.

        Raises:
            NotSetUp: The model that the step begins with is not here.
        """
        if self._held_d is None:
            raise NotSetUp(_RESTARTED)
        weights_d = take_step(
            self._optimizer,
            self._layout(),
            weights_d=self._held_d,
            moments=self._moments,
            delta_f=mean_f,
            fragment=fragment,
        )
        if change.digest(weights_d) != task.changed_to:
            self._held_d, self._digest = None, ""
            raise NotSetUp(
                "found a different model than the aggregator did from the same sum"
            )
        self._held_d, self._digest = weights_d, task.changed_to
        return weights_d

    def _of_sums(self, task: RoundTask) -> Vector:
        """Return the model that ``follow`` has found, or take a whole one.

        A whole one after the first round comes with the optimiser's state, vector by
        vector in the order of their names: later steps begin with it.
        """
        if task.changed_to:
            if self._held_d is None:
                raise NotSetUp(_RESTARTED)
            self._digest = self._digest or change.digest(self._held_d)
            if self._digest != task.changed_to:
                raise NotSetUp(
                    "has a different model than the one that the change applies to"
                )
            return self._held_d
        weights_d, size = self.whole(task), self._layout().size
        moments = {
            name: place(values_d, self.allocate)
            for name, values_d in self._optimizer.init(size).items()
        }
        given = task.weights_d.size // size - 1
        if given not in {0, len(moments)}:
            raise ProtocolError(
                f"was sent {task.weights_d.size} values for a model of {size}"
            )
        for number, name in enumerate(sorted(moments) if given else (), start=1):
            part = slice(number * size, (number + 1) * size)
            moments[name] = copied(task.weights_d[part], self.allocate)
        self._held_d, self._digest = copied(weights_d, self.allocate), ""
        self._moments = moments
        return self._held_d

    def _changed(self, task: RoundTask) -> Vector:
        held_d, codec, words = self._held_d, self._links.down, task.weights_d
        if held_d is None:
            raise NotSetUp(_RESTARTED)
        if self._digest == task.changed_to:  # The same task once more.
            return held_d
        _check_type(task, codec)
        if fault := codec.fault(words, held_d.size):
            raise ProtocolError(f"received a change that cannot be read: {fault}")
        weights_d = change.add(
            codec,
            held_d,
            words,
            out_d=self.allocate(held_d.size),
            seed=task.based_on,
        )
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
