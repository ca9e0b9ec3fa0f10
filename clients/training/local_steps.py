"""The optimisers of a site's local steps."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from numpy.typing import NDArray

from clients.data.datasets import Indices
from clients.factories import call_factory, import_factory
from clients.float32_muon import Float32Muon
from clients.learning_rate import rate_of
from clients.methods import registry as methods
from clients.methods.guest import Guest
from clients.models.hidden_matrices import hidden_matrices
from clients.sixteen_bits import multiplies_bfloat16
from federation.errors import JobError
from federation.job.code_files import unpinned
from federation.job.metrics import is_function
from federation.job.spec import JobSpec, OptimizerSpec
from federation.methods.registry import METHODS
from federation.vectors import NO_ARRAYS, Arrays

_KEPT = "optimizer/"
_STEP = "step"  # A number of the optimiser, not of the weights.


def make_optimizers(
    model: torch.nn.Module, spec: OptimizerSpec
) -> tuple[torch.optim.Optimizer, ...]:
    """Make optimisers without state, as the job's ``training.optimizer`` says.

    Each trained parameter is in exactly one of them.

    Raises:
        JobError: ``muon`` finds no hidden matrix, see ``clients.models``; torch is
            older than it; or an optimiser does not take the job's options.
        UserCodeError: A function of the user's failed.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if spec.name == "sgd":
        return (
            torch.optim.SGD(
                trained,
                lr=spec.lr,
                momentum=spec.momentum,
                nesterov=spec.nesterov,
                weight_decay=spec.weight_decay,
            ),
        )
    if spec.name in {"adam", "adamw"}:
        return (_adam(trained, spec),)
    if spec.name != "muon":
        return (_other(trained, spec),)
    if not hasattr(torch.optim, "Muon"):
        raise JobError(
            f"'muon' came with torch 2.9, and this is {torch.__version__}: install a "
            "newer torch, or choose another optimiser",
            key="training.optimizer.name",
        )
    hidden = list(hidden_matrices(model, spec).values())
    found = {id(p) for p in hidden}
    muon = _muon(hidden, spec)
    rest = [p for p in trained if id(p) not in found]
    return (muon, _adam(rest, spec)) if rest else (muon,)


def _muon(
    hidden: Sequence[torch.nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    if not multiplies_bfloat16(hidden[0].device):
        return Float32Muon(
            hidden, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
    return torch.optim.Muon(
        hidden,
        lr=spec.lr,
        momentum=spec.momentum,
        nesterov=True,
        weight_decay=spec.weight_decay,
        # Scaled to the size of AdamW's steps, arXiv:2502.16982, equation 4: one
        # learning rate suits both.
        adjust_lr_fn="match_rms_adamw",
    )


def _other(
    trained: Sequence[torch.nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    """Make an optimiser of torch by its name, or one of the user's."""
    key, options = "training.optimizer", dict(spec.options)
    if is_function(spec.name):
        make = import_factory(spec.name, key=f"{key}.name")
    else:
        names = {name.lower(): name for name in dir(torch.optim)}
        make = getattr(torch.optim, names[spec.name])
        if spec.weight_decay:
            options["weight_decay"] = spec.weight_decay
    found = call_factory(
        partial(make, list(trained)), {"lr": spec.lr, **options}, key=f"{key}.options"
    )
    if not isinstance(found, torch.optim.Optimizer):
        raise JobError(
            f"{unpinned(spec.name)} returned a {type(found).__name__}, not a "
            "torch.optim.Optimizer",
            key=f"{key}.name",
        )
    held = [id(p) for group in found.param_groups for p in group["params"]]
    if sorted(held) != sorted(map(id, trained)):
        raise JobError(
            f"{unpinned(spec.name)} must give each parameter that it receives to "
            f"exactly one group: it received {len(trained)}, and its groups hold "
            f"{len(held)}",
            key=f"{key}.name",
        )
    return found


def _adam(
    parameters: Sequence[torch.nn.Parameter], spec: OptimizerSpec
) -> torch.optim.Optimizer:
    algorithm: type[torch.optim.Adam]
    algorithm = torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW
    first, second = spec.betas
    return algorithm(
        parameters, lr=spec.lr, betas=(first, second), weight_decay=spec.weight_decay
    )


class LocalOptimizer:
    """The optimisers of one round at a site, and what they hand on to the next."""

    def __init__(
        self,
        model: torch.nn.Module,
        job: JobSpec,
        kept: Arrays = NO_ARRAYS,
        *,
        guests: Sequence[Guest] = (),
    ) -> None:
        """Begin a round of a model that holds the global weights.

        Args:
            model: Trained in place.
            job: Sets the optimiser and its schedule.
            kept: What an earlier round has kept, if the job asks for that.
            guests: Methods that take part in each step.
        """
        self._job = job
        self._named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self.guests = guests
        self._takes_sparse = _takes_sparse(job)
        self._optimizers = make_optimizers(model, job.training.optimizer)
        self._rates = [
            [group["lr"] for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._state_of: dict[torch.nn.Parameter, dict[str, Any]] = {
            parameter: optimizer.state[parameter]  # An empty one begins to be used.
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._keeps = job.training.optimizer.state == "keep"
        if self._keeps:
            self._restore(kept)

    @property
    def skipped(self) -> int:
        """Steps of the round that were not taken, since a method said so."""
        return sum(guest.skipped for guest in self.guests)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of which gradients are to be taken."""
        for guest in self.guests:
            loss = guest.loss_(loss)
        return loss

    def step(self, number: int) -> None:
        """Take a step along the gradients that are there, and clear them.

        Unless a method says after ``gradient_`` that it must not be taken.

        Args:
            number: Its place in the schedule of the rate, counted over the run from 0.
        """
        if not self._takes_sparse:
            for parameter in self._parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        if not any(guest.gradient_() is False for guest in self.guests):
            self._take(number)
            for guest in self.guests:
                guest.after_step_()
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _take(self, number: int) -> None:
        training = self._job.training
        if training.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, training.clip_grad_norm)
        rate, full = rate_of(self._job, number), self._job.training.optimizer.lr
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, own in zip(optimizer.param_groups, rates, strict=True):
                # A user's groups may have rates of their own.
                group["lr"] = rate if own == full else own * rate / full
            optimizer.step()

    def kept(self) -> Arrays:
        """Return copies of the optimiser's state, if the job keeps it."""
        return self._state() if self._keeps else NO_ARRAYS

    def state(self) -> Arrays:
        """Return copies of what ``restore`` continues a round from."""
        return self._state() | methods.states(self.guests)

    def _state(self) -> dict[str, NDArray[Any]]:
        """Copy the optimiser's state.

        bfloat16, which NumPy lacks, goes as float32 and comes back the same.
        """
        return {
            f"{_KEPT}{name}/{kind}": _array(value)
            for name, parameter in self._named.items()
            for kind, value in self._state_of[parameter].items()
            if value is not None
        }

    def groups_text(self) -> str:
        """What its groups hold beside parameters and rates, which steps set."""
        return repr(
            [
                [(key, group[key]) for key in sorted(group.keys() - {"params", "lr"})]
                for optimizer in self._optimizers
                for group in optimizer.param_groups
            ]
        )

    def is_all_tensors(self) -> bool:
        """Whether ``state`` has all that it keeps of each parameter."""
        return all(
            value is None or isinstance(value, torch.Tensor)
            for parameter in self._named.values()
            for value in self._state_of[parameter].values()
        )

    def restore(self, state: Arrays) -> None:
        """Put the ``state`` of the same round in place of the present one."""
        self._restore(state)
        for guest in self.guests:
            guest.restore(state)

    def _restore(self, kept: Arrays) -> None:
        for full_name, array in kept.items():
            if not full_name.startswith(_KEPT):
                continue
            name, _, kind = full_name.removeprefix(_KEPT).rpartition("/")
            parameter, value = self._named[name], torch.tensor(array)
            if kind != _STEP:
                value = value.to(dtype=parameter.dtype, device=parameter.device)
            self._state_of[parameter][kind] = value


def _takes_sparse(job: JobSpec) -> bool:
    """Whether a step can take the sparse gradients of ``nn.Embedding(sparse=True)``.

    So does plain SGD, and an optimiser of the user's, such as ``SparseAdam``.
    """
    training, optimizer = job.training, job.training.optimizer
    is_plain = (
        optimizer.name == "sgd" and optimizer.momentum == optimizer.weight_decay == 0
    )
    return (is_plain or is_function(optimizer.name)) and not (
        training.clip_grad_norm
        or any(method.is_on(job) for method in METHODS if method.needs_dense)
    )


def _array(value: object) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        raise JobError(
            f"this optimiser keeps a {type(value).__name__}, and only tensors can be "
            'kept between rounds: use state = "fresh"',
            key="training.optimizer.state",
        )
    wide = value.float() if value.dtype is torch.bfloat16 else value
    found: NDArray[Any] = wide.detach().cpu().contiguous().numpy().copy()
    return found


def groups(items: Iterator[Indices], size: int) -> Iterator[list[Indices]]:
    """Cut a stream of batches into the batches of one optimiser step."""
    while group := list(islice(items, size)):
        yield group
