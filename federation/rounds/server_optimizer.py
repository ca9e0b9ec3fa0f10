"""Apply a combined update: eight optimisers as pairs of functions.

They see the pseudo-gradient ``g = -update`` (update: local minus global weights) chunk
by chunk, and write the step over it and their state over itself, as
``federation.protocols.ServerOptimizer`` says. The round loop adds the step to theta.

Shape suffix: c values of a chunk, p of a piece of it.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from federation.compression.fragments import WHOLE, Fragment
from federation.job.spec import ServerOptimizerSpec
from federation.mapped import give_back
from federation.protocols import OptimizerState, ServerOptimizer
from federation.vectors import Layout, Role, Vector, chunks

# So little memory is used again, where more would be new pages for every chunk.
_SIGN_VALUES = 1 << 14

# Rewrites a chunk of the second moment, from (it, squared update) in place.
_SecondMoment = Callable[[Vector, Vector], None]


def server_optimizer(spec: ServerOptimizerSpec, *, period: int = 1) -> ServerOptimizer:
    """Return the optimiser that a job names.

    Args:
        spec: The job's.
        period: ``JobSpec.models_per_round``.
    """
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
        # Of FedDyn; see ``clients.methods.feddyn``.
        "running_sum": partial(nesterov, lr=spec.lr, decay=1.0),
    }
    if period > 1 and spec.name == "nesterov":
        return delayed_nesterov(lr=spec.lr, decay=spec.momentum, period=period)
    return makers[spec.name]()


def take_step(
    optimizer: ServerOptimizer,
    layout: Layout,
    *,
    weights_d: Vector,
    moments: OptimizerState,
    delta_f: Vector,
    fragment: Fragment = WHOLE,
) -> Vector:
    """Compute ``theta + step(Delta)``, chunk by chunk and over ``delta_f`` if whole.

    Value by value, in NumPy: from the same bits follow the same bits on all machines.
    Running statistics are combined and never stepped: a step could make a variance
    negative.

    Args:
        optimizer: The server optimiser.
        layout: Layout of the model.
        weights_d: theta; not changed.
        moments: The optimiser's state; overwritten.
        delta_f: Delta of a fragment, shape ``(f,)``; overwritten.
        fragment: Which one; the rest of the model does not change, nor does the
            optimiser's state for it.

    Returns:
        The next model, shape ``(d,)``.
    """
    if fragment != WHOLE:
        return _step_of_fragment(
            optimizer, fragment, weights_d=weights_d, moments=moments, delta_f=delta_f
        )
    delta_d = delta_f
    averaged = [
        (spec.offset, (theta + delta).reshape(-1))
        for (spec, theta), (_, delta) in zip(
            layout.float_views(weights_d), layout.float_views(delta_d), strict=True
        )
        if spec.role is Role.BUFFER
    ]
    for piece in chunks(delta_d.size):
        state = {name: values_d[piece] for name, values_d in moments.items()}
        step_c = delta_d[piece]
        optimizer.step(state, step_c)  # Delta becomes the step.
        step_c += weights_d[piece]
        for part_c in (*state.values(), weights_d[piece], step_c):
            give_back(part_c)
    for start, values in averaged:
        delta_d[start : start + values.size] = values
    return delta_d


def _step_of_fragment(
    optimizer: ServerOptimizer,
    fragment: Fragment,
    *,
    weights_d: Vector,
    moments: OptimizerState,
    delta_f: Vector,
) -> Vector:
    """Step the values of one fragment; a model in fragments has no statistics."""
    taken = {name: fragment.take(values_d) for name, values_d in moments.items()}
    for piece in chunks(delta_f.size):
        optimizer.step({name: t[piece] for name, t in taken.items()}, delta_f[piece])
    delta_f += fragment.take(weights_d)
    for name, values_f in taken.items():
        fragment.put_(values_f, moments[name])
    return fragment.put_(delta_f, weights_d.copy())


def average(*, lr: float) -> ServerOptimizer:
    """Take the update: ``theta += lr * update``. No state.

    With ``lr = 1`` this is FedAvg, exactly ``weights + update`` in float32.
    """

    def step(_state: OptimizerState, update_c: Vector) -> None:
        if lr != 1.0:
            update_c *= lr

    return ServerOptimizer(init=lambda _size: {}, step=step)


def momentum(*, lr: float, decay: float) -> ServerOptimizer:
    """Heavy ball: ``v = decay * v + g``, ``theta -= lr * v``.

    FedAvgM in Hsu et al., arXiv:1909.06335, Section 4.
    """

    def step(state: OptimizerState, update_c: Vector) -> None:
        velocity_c = state["velocity"]
        velocity_c *= decay
        velocity_c -= update_c  # g = -update
        np.multiply(velocity_c, -lr, out=update_c)

    return ServerOptimizer(init=_init_velocity, step=step)


def nesterov(*, lr: float, decay: float) -> ServerOptimizer:
    """Nesterov momentum: ``v = decay * v + g``, ``theta -= lr * (g + decay * v)``.

    DiLoCo's outer optimiser, Douillard et al., arXiv:2311.08105, Section 2, in the
    form of ``torch.optim.SGD(nesterov=True)``.
    """

    def step(state: OptimizerState, update_c: Vector) -> None:
        velocity_c = state["velocity"]
        velocity_c *= decay
        velocity_c -= update_c  # g = -update
        update_c -= velocity_c * decay
        update_c *= lr

    return ServerOptimizer(init=_init_velocity, step=step)


def delayed_nesterov(*, lr: float, decay: float, period: int) -> ServerOptimizer:
    """Nesterov momentum whose velocity changes with every ``period``-th model only.

    For buffers, which hold ``1 / period`` of the sites: for each of them ``s = s + g``,
    ``theta -= lr * g``; and for every ``period``-th ``v = decay * v + s``, ``theta -=
    lr * (g + decay * v)``, ``s = 0``. Liu et al., arXiv:2401.09135, Algorithm 3 with
    c = 0. Its g / N is g here: a buffer's part of the step of all sites. Taken with
    every model, momentum repeats updates that are based on old models, and is unstable
    (Section 4 there). With a period of 1 this is ``nesterov``.
    """

    def between(state: OptimizerState, update_c: Vector) -> None:
        state["arrived"] += update_c
        update_c *= lr

    def step(state: OptimizerState, update_c: Vector) -> None:
        arrived_c = state["arrived"]  # Without the newest.
        velocity_c = state["velocity"]
        velocity_c *= decay
        velocity_c -= arrived_c
        velocity_c -= update_c  # s = -(arrived + update)
        update_c -= velocity_c * decay
        update_c *= lr
        arrived_c[:] = 0.0

    def init(size: int) -> OptimizerState:
        return {**_init_velocity(size), "arrived": np.zeros(size, dtype=np.float32)}

    return ServerOptimizer(init=init, step=step, period=period, between=between)


def adagrad(*, lr: float, beta1: float, tau: float) -> ServerOptimizer:
    """FedAdagrad: ``v += update^2``; the rest as in ``adam``."""

    def second_moment(second_c: Vector, square_c: Vector) -> None:
        second_c += square_c

    return _adaptive(second_moment, lr=lr, beta1=beta1, tau=tau)


def adam(*, lr: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedAdam: Reddi et al., arXiv:2003.00295, Algorithm 2.

    ``m = beta1 * m + (1 - beta1) * update``,
    ``v = beta2 * v + (1 - beta2) * update^2``,
    ``theta += lr * m / (sqrt(v) + tau)``. There is no bias correction. The
    algorithm asks for ``v >= tau^2`` at the start: here it is ``tau^2``, and m is 0.
    """

    def second_moment(second_c: Vector, square_c: Vector) -> None:
        square_c *= 1 - beta2
        second_c *= beta2
        second_c += square_c

    return _adaptive(second_moment, lr=lr, beta1=beta1, tau=tau)


def yogi(*, lr: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedYogi: ``v -= (1 - beta2) * update^2 * sign(v - update^2)``; else ``adam``."""

    def second_moment(second_c: Vector, square_c: Vector) -> None:
        for piece in chunks(second_c.size, _SIGN_VALUES):
            moment_p, square_p = second_c[piece], square_c[piece]
            # In place, ``sign`` goes value by value: five times as long.
            sign_p = np.sign(moment_p - square_p)
            square_p *= 1 - beta2
            square_p *= sign_p
            moment_p -= square_p

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

    def step(state: OptimizerState, update_c: Vector) -> None:
        first_c, second_c = state["first_moment"], state["second_moment"]
        second_moment(second_c, np.square(update_c))
        first_c *= beta1
        update_c *= 1 - beta1
        first_c += update_c
        root_c = np.sqrt(second_c)
        root_c += tau
        np.divide(first_c, root_c, out=update_c)
        update_c *= lr

    return ServerOptimizer(init=init, step=step)


def _init_velocity(size: int) -> OptimizerState:
    return {"velocity": np.zeros(size, dtype=np.float32)}
