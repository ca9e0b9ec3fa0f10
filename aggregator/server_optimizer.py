"""What the server does with a combined update: six optimisers as pairs of functions.

They see the pseudo-gradient ``g = -update`` (update: local minus global weights).
All work chunk by chunk and in place, as ``federation.protocols.ServerOptimizer``
says: new weights over the update, state over itself, weights left alone.

Shape suffixes: d float values of the model, c values of a chunk.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from federation.job.spec import ServerOptimizerSpec
from federation.protocols import OptimizerState, ServerOptimizer
from federation.vectors import CHUNK_VALUES, Vector, chunks

# Rewrites a chunk of the second moment, from (it, squared update, buffer) in place.
_SecondMoment = Callable[[Vector, Vector, Vector], None]


def server_optimizer(spec: ServerOptimizerSpec) -> ServerOptimizer:
    """Return the optimiser that a job names."""
    makers: dict[str, Callable[[], ServerOptimizer]] = {
        "average": partial(average, lr=spec.lr),
        "momentum": partial(momentum, lr=spec.lr, decay=spec.momentum),
        "nesterov": partial(nesterov, lr=spec.lr, decay=spec.momentum),
        "adagrad": partial(adagrad, lr=spec.lr, beta1=spec.beta1, tau=spec.tau),
        "adam": partial(
            adam, lr=spec.lr, beta1=spec.beta1, beta2=spec.beta2, tau=spec.tau
        ),
        "yogi": partial(
            yogi, lr=spec.lr, beta1=spec.beta1, beta2=spec.beta2, tau=spec.tau
        ),
    }
    return makers[spec.name]()


def average(*, lr: float) -> ServerOptimizer:
    """Take the update: ``theta += lr * update``. No state.

    With ``lr = 1`` this is FedAvg, exactly ``weights + update`` in float32.
    """

    def apply(
        weights_d: Vector, state: OptimizerState, update_d: Vector
    ) -> tuple[Vector, OptimizerState]:
        for piece in chunks(weights_d.size):
            update_c = update_d[piece]
            if lr != 1.0:
                update_c *= lr
            update_c += weights_d[piece]
        return update_d, state

    return ServerOptimizer(init=lambda _size: {}, apply=apply)


def momentum(*, lr: float, decay: float) -> ServerOptimizer:
    """Heavy ball: ``v = decay * v + g``, ``theta -= lr * v``.

    FedAvgM in Hsu et al., arXiv:1909.06335, Section 4.
    """

    def apply(
        weights_d: Vector, state: OptimizerState, update_d: Vector
    ) -> tuple[Vector, OptimizerState]:
        for piece in chunks(weights_d.size):
            update_c, velocity_c = update_d[piece], state["velocity"][piece]
            velocity_c *= decay
            velocity_c -= update_c  # g = -update
            np.multiply(velocity_c, -lr, out=update_c)
            update_c += weights_d[piece]
        return update_d, state

    return ServerOptimizer(init=_init_velocity, apply=apply)


def nesterov(*, lr: float, decay: float) -> ServerOptimizer:
    """Nesterov momentum: ``v = decay * v + g``, ``theta -= lr * (g + decay * v)``.

    DiLoCo's outer optimiser, Douillard et al., arXiv:2311.08105, Section 2, in the
    form of ``torch.optim.SGD(nesterov=True)``.
    """

    def apply(
        weights_d: Vector, state: OptimizerState, update_d: Vector
    ) -> tuple[Vector, OptimizerState]:
        buffer = _buffer(weights_d)
        for piece in chunks(weights_d.size):
            update_c, velocity_c = update_d[piece], state["velocity"][piece]
            velocity_c *= decay
            velocity_c -= update_c  # g = -update
            ahead_c = np.multiply(velocity_c, decay, out=buffer[: update_c.size])
            update_c -= ahead_c
            update_c *= lr
            update_c += weights_d[piece]
        return update_d, state

    return ServerOptimizer(init=_init_velocity, apply=apply)


def adagrad(*, lr: float, beta1: float, tau: float) -> ServerOptimizer:
    """FedAdagrad: ``v += update^2``; the rest as in ``adam``."""

    def second_moment(second_c: Vector, square_c: Vector, _buffer_c: Vector) -> None:
        second_c += square_c

    return _adaptive(second_moment, lr=lr, beta1=beta1, tau=tau)


def adam(*, lr: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedAdam: Reddi et al., arXiv:2003.00295, Algorithm 2.

    ``m = beta1 * m + (1 - beta1) * update``,
    ``v = beta2 * v + (1 - beta2) * update^2``,
    ``theta += lr * m / (sqrt(v) + tau)``. There is no bias correction. The
    algorithm asks for ``v >= tau^2`` at the start: here it is ``tau^2``, and m is 0.
    """

    def second_moment(second_c: Vector, square_c: Vector, _buffer_c: Vector) -> None:
        square_c *= 1 - beta2
        second_c *= beta2
        second_c += square_c

    return _adaptive(second_moment, lr=lr, beta1=beta1, tau=tau)


def yogi(*, lr: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedYogi: ``v -= (1 - beta2) * update^2 * sign(v - update^2)``; else ``adam``."""

    def second_moment(second_c: Vector, square_c: Vector, buffer_c: Vector) -> None:
        sign_c = np.subtract(second_c, square_c, out=buffer_c)
        np.sign(sign_c, out=sign_c)
        square_c *= 1 - beta2
        square_c *= sign_c
        second_c -= square_c

    return _adaptive(second_moment, lr=lr, beta1=beta1, tau=tau)


def _adaptive(
    second_moment: _SecondMoment, *, lr: float, beta1: float, tau: float
) -> ServerOptimizer:
    """Algorithm 2 of arXiv:2003.00295 around its rule for the second moment."""

    def init(size: int) -> OptimizerState:
        return {
            "first_moment": np.zeros(size, dtype=np.float32),
            "second_moment": np.full(size, tau**2, dtype=np.float32),
        }

    def apply(
        weights_d: Vector, state: OptimizerState, update_d: Vector
    ) -> tuple[Vector, OptimizerState]:
        square_buffer, other_buffer = _buffer(weights_d), _buffer(weights_d)
        for piece in chunks(weights_d.size):
            update_c = update_d[piece]
            first_c, second_c = (
                state["first_moment"][piece],
                state["second_moment"][piece],
            )
            square_c = np.square(update_c, out=square_buffer[: update_c.size])
            other_c = other_buffer[: update_c.size]
            second_moment(second_c, square_c, other_c)
            first_c *= beta1
            update_c *= 1 - beta1
            first_c += update_c
            root_c = np.sqrt(second_c, out=other_c)
            root_c += tau
            np.divide(first_c, root_c, out=update_c)
            update_c *= lr
            update_c += weights_d[piece]
        return update_d, state

    return ServerOptimizer(init=init, apply=apply)


def _init_velocity(size: int) -> OptimizerState:
    return {"velocity": np.zeros(size, dtype=np.float32)}


def _buffer(weights_d: Vector) -> Vector:
    """Room for one chunk."""
    return np.empty(min(weights_d.size, CHUNK_VALUES), dtype=np.float32)
