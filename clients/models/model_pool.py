"""Instances of a job's model, shared by all sites of a process.

A site keeps no model between rounds, so a thousand simulated sites need no more
instances than train at the same time.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from clients.factories import Factory, call_factory, import_factory, name_of
from clients.models import lazy_compiler, personal, weights
from clients.models.freezing import freeze
from clients.models.hidden_matrices import hidden_matrices
from clients.models.objectives import Objective, objective_of
from clients.randomness import GlobalDraws, seeded_globally, torch_seed
from clients.users_trainer import adopt, check_loop, is_trainer
from federation.errors import JobError
from federation.job.adapter_ranks import check_adapters, ranks_of
from federation.job.adapters import check_exact, check_factors
from federation.job.metrics import TRAINER
from federation.job.selection_checks import counts_for_nan
from federation.job.spec import JobSpec
from federation.tree import Tree, leaves, num_records
from federation.vectors import (
    AVERAGED,
    NO_ARRAYS,
    Arrays,
    IntegerVector,
    Layout,
    Role,
    Vector,
)
from privacy.dp_sgd.fit import fit_for_privacy, without_batch_norm
from privacy.dp_sgd.probe import Forward, check_records_apart

_Use = tuple[
    bool, tuple[tuple[int, ...], ...], tuple[torch.dtype, ...], tuple[bool, ...]
]


class RecordsApart:
    """Tests the models of one factory before they are used with guarantees.

    Kept beside the factory, since all of its models are built alike.

    Attributes:
        passed: The ways of use that were tested: for gradients or not, shape and type
            of a record, and the mode of every module.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without a test.

        Args:
            device: Where the models live.
        """
        self._device = device
        self.passed: set[_Use] = set()

    def check(
        self,
        model: torch.nn.Module,
        inputs: Tree,
        forward: Forward,
        *,
        gradients: bool,
    ) -> None:
        """Test a model, if none was tested in this mode on records of this shape.

        Args:
            model: As it is about to be used; nothing of it is changed.
            inputs: Of the batch that it is about to be used on. One record has no
                other that it could be mixed with.
            forward: Applies a model to inputs, and perhaps an objective.
            gradients: It is used for gradients, not only for losses.

        Raises:
            JobError: It mixes records.
        """
        if num_records(inputs) < 2:  # noqa: PLR2004 - a record and another one.
            return
        modes = tuple(module.training for module in model.modules())
        parts = tuple(leaves(inputs))
        shapes = tuple(tuple(part.shape[1:]) for part in parts)
        use = (gradients, shapes, tuple(part.dtype for part in parts), modes)
        if use in self.passed:
            return
        check_records_apart(
            model, inputs, forward, draws=self._draws, gradients=gradients
        )
        self.passed.add(use)

    def _draws(self, seed: int) -> AbstractContextManager[object]:
        return seeded_globally(seed, self._device)


def build(factory: Factory, options: Mapping[str, Any]) -> torch.nn.Module:
    """Call the factory of a job's model.

    Args:
        factory: From ``import_factory``.
        options: Its keyword arguments.

    Raises:
        JobError: It is no function, does not take these options, or returns no model.
        UserCodeError: The factory itself failed; the cause is kept.
    """
    module = call(factory, options)
    return module.model if is_trainer(module) else module  # type: ignore[no-any-return]


def call(factory: Factory, options: Mapping[str, Any]) -> Any:
    """Call the factory of a job's model; see ``build``.

    Returns:
        The model, or the ``transformers.Trainer`` that has it.
    """
    key = "model.factory"
    if isinstance(factory, torch.nn.Module):
        raise JobError(
            f"is a {type(factory).__name__} and not a function that returns one: "
            "sites need separate models, so build it in a function and name that",
            key=key,
        )
    module = call_factory(factory, options, key="model.options")
    if isinstance(module, torch.nn.Module) or is_trainer(module):
        return module
    found = "None" if module is None else f"a {type(module).__name__}"
    hint = ": does it end with a return statement?" if module is None else ""
    raise JobError(
        f"{name_of(factory)} returned {found}, not a torch.nn.Module{hint}", key=key
    )


class Instance:
    """One instance of the model, which can be reset.

    Attributes:
        module: The model.
        trainer: The ``transformers.Trainer`` that the factory returned; None if it
            returned the model itself.
    """

    def __init__(
        self, module: torch.nn.Module, layout: Layout, trainer: Any = None
    ) -> None:
        """Note what the module is like when it is new."""
        self.module = module
        self.trainer = trainer
        self._layout = layout
        self._first_p = personal.read(module, layout)
        self._begin = _Snapshot(module)
        frozen = {t.name for t in layout.tensors if t.role is Role.FROZEN}
        named = weights.parameters_by_name(module)
        self._frozen = [tensor for name, tensor in named.items() if name in frozen]
        self._versions = self._frozen_versions()
        is_sharded = any(hasattr(tensor, "to_local") for tensor in self._frozen)
        self._digest = (
            weights.frozen_digest(module, layout) if is_sharded else layout.frozen
        )

    def load(
        self, weights_d: Vector, integers_m: IntegerVector, kept: Arrays = NO_ARRAYS
    ) -> None:
        """Reset the module and load the given weights.

        Args:
            weights_d: Shape ``(d,)``.
            integers_m: Shape ``(m,)``.
            kept: The site's state, with its personal parts; without them, they are as
                in a new model.
        """
        self.reset()
        weights.load(self.module, self._layout, weights_d, integers_m)
        own_p = personal.own_part(kept)
        begin_p = self._first_p if own_p is None else own_p
        personal.load(self.module, self._layout, begin_p)

    def check_unchanged(self) -> None:
        """Check that its tensors are those of the layout, and frozen ones unchanged.

        Raises:
            JobError: Training has added or resized one, or changed a frozen one, which
                nothing reloads.
        """
        weights.state_of(self.module, self._layout)
        versions = self._frozen_versions()
        if versions == self._versions:
            return
        # Written to, perhaps with the values that were there: private steps do that.
        if weights.frozen_digest(self.module, self._layout) != self._digest:
            raise JobError(
                "has frozen tensors (requires_grad is False) that training changed, "
                "but frozen tensors are never sent: let them require a gradient, or "
                "make them buffers",
                key="model.factory",
            )
        self._versions = versions

    def _frozen_versions(self) -> list[int]:
        return [tensor._version for tensor in self._frozen]  # noqa: SLF001 -- torch's

    def reset(self) -> None:
        """Reset everything but weights: gradients, hooks, caches, counters."""
        self._begin.restore()
        self.module.zero_grad(set_to_none=True)


class ModelPool:
    """Builds a job's model when needed and keeps it for the next user.

    Attributes:
        device: Where the models live.
        layout: Layout of the model.
        objective: What training minimises.
        draws: Makes models that draw random numbers reproducible.
        records_apart: Tests these models for mixing records.
        noted: Warnings about these models that a site of this process has logged.
        replaced: Layers that differential privacy has replaced, for people to read.
        trained_spans: Places ``[start, stop)`` of these in the flat vector.
        exact: Adapters whose products the aggregator averages.
        ranks: Of the sites that train fewer than all ranks of adapters, by site.
        num_trained: Values that training changes: those of parameters that require a
            gradient.
    """

    def __init__(
        self,
        job: JobSpec,
        place_: Callable[[torch.nn.Module], None] | None = None,
        *,
        starts: bool = True,
    ) -> None:
        """Build the first instance, with the job's seed.

        Args:
            job: Names the factory, the device and the seed.
            place_: Puts a new model where it trains; without it models go to the
                job's device.
            starts: Whether to keep a copy of the initial weights, for a run to start
                from. A deployed site receives all weights.

        Raises:
            JobError: The factory cannot be imported or called, returns something
                that cannot be trained, or the device is not there.
        """
        lazy_compiler.defer()
        self._factory = import_factory(job.model.factory, key="model.factory")
        self.objective: Objective = objective_of(job.training, counts_for_nan(job))
        self._options = job.model.options
        self._frozen = job.model.frozen
        self._seed = torch_seed(job.seed, "initial weights")
        self._privacy = job.privacy.differential_privacy
        self._lock = threading.Lock()
        self._memory: WeakKeyDictionary[torch.nn.Module, set[int]]
        self._memory = WeakKeyDictionary()
        self.device = _device(job.training.device)
        self.draws = GlobalDraws(self.device)
        self.records_apart = RecordsApart(self.device)
        self.noted: set[str] = set()
        self.replaced: tuple[str, ...] = ()
        self._has_loop = job.training.task == TRAINER
        first, trainer = self._build()
        # An app of Flower's is given the whole model in Flower's own words.
        self._sends_frozen = any(site.flower_app is not None for site in job.sites)
        self._integer_buffers = job.model.integer_buffers
        self._personal = job.model.personal
        self.ranks = ranks_of(job)  # Found once: there may be thousands of sites.
        self.layout: Layout = self._layout_of(first)
        check_adapters(job, self.layout)
        self.exact = weights.exact_factors(first)
        if self.exact:
            check_exact(job)
            check_factors(self.exact, self.layout)
        if job.training.optimizer.name == "muon":
            hidden_matrices(first, job.training.optimizer)  # Refuses a model with none.
        self.num_trained = sum(p.numel() for p in first.parameters() if p.requires_grad)
        self.trained_spans = weights.trained_spans(first, self.layout)
        _check_finite(self.layout, first)
        self._initial = weights.read(first, self.layout) if starts else None
        self._place_ = place_ or (lambda module: module.to(self.device))
        self._idle = [self._instance(first, trainer)]

    def initial_weights(self) -> tuple[Vector, IntegerVector]:
        """Weights that the job's seed gives: shapes ``(d,)`` and ``(m,)``."""
        if self._initial is None:
            raise ValueError("this pool keeps no initial weights")
        weights_d, integers_m = self._initial
        return weights_d.copy(), integers_m.copy()

    def reserve(self, num_instances: int) -> None:
        """Build instances ahead, so that a factory's mistakes show before the run.

        Args:
            num_instances: How many will be lent at the same time.

        Raises:
            JobError: The factory does not make a new model each time.
        """
        while len(self._idle) < num_instances:
            self._idle.append(self._instance(*self._another()))

    def frozen_arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the tensors that are not trained and never travel, by name."""
        with self.borrow() as model:
            return weights.frozen_arrays(model.module, self.layout)

    @contextmanager
    def borrow(self) -> Iterator[Instance]:
        """Lend an instance; load it before use.

        Raises:
            JobError: The factory does not make a new model each time.
        """
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        if instance is None:
            instance = self._instance(*self._another())
        try:
            yield instance
            instance.check_unchanged()
        finally:
            instance.reset()
            with self._lock:
                self._idle.append(instance)

    def _layout_of(self, module: torch.nn.Module) -> Layout:
        return weights.layout_of(
            module,
            self._integer_buffers,
            personal_patterns=self._personal,
            sends_frozen=self._sends_frozen,
        )

    def _another(self) -> tuple[torch.nn.Module, Any]:
        module, trainer = self._build()
        layout = self._layout_of(module)
        if layout.tensors != self.layout.tensors:
            tensors = zip(self.layout.tensors, layout.tensors, strict=False)
            first, second = next(
                ((a, b) for a, b in tensors if a != b),
                (self.layout.tensors[-1], layout.tensors[-1]),
            )
            raise JobError(
                f"returned a second model with a different shape: first {first.name!r} "
                f"{first.shape}, then {second.name!r} {second.shape}; build the same "
                "layers in every call",
                key="model.factory",
            )
        # All else is loaded from the global weights.
        if layout.frozen != self.layout.frozen:
            raise JobError(
                "returned a second model whose frozen tensors differ from the first "
                "one's, but frozen tensors are never sent: read them from a file, or "
                "draw them with torch, which is seeded for every call",
                key="model.factory",
            )
        return module, trainer

    def _instance(self, module: torch.nn.Module, trainer: Any) -> Instance:
        self._place_(module)
        memory = weights.memory_of(module)
        with self._lock:
            self._check_new(module, memory)
            self._memory[module] = memory
        return Instance(module, self.layout, trainer)

    def _build(self) -> tuple[torch.nn.Module, Any]:
        """Make a model, and the Trainer that comes with it, if there is one."""
        with seeded_globally(self._seed, self.device):
            made = call(self._factory, self._options)
            trainer = made if is_trainer(made) else None
            module: torch.nn.Module = made if trainer is None else trainer.model
            freeze(module, self._frozen)  # Privacy asks nothing of frozen layers.
            if self._privacy.enabled:
                # Before any layout is taken. What takes a layer's place may draw.
                is_site = self._privacy.unit == "site"
                fit = without_batch_norm if is_site else fit_for_privacy
                module, replaced = fit(module)
                self.replaced = tuple(replaced)
                freeze(module, self._frozen)  # Layers in the place of frozen ones.
        if not self._has_loop:
            return module, None
        if trainer is None:
            raise JobError(
                f"{name_of(self._factory)} returned a model, but the task "
                f'"{TRAINER}" needs a transformers.Trainer: return it, or name another '
                "task in training.task",
                key="model.factory",
            )
        check_loop(trainer)
        adopt(trainer, module)
        return module, trainer

    def _check_new(self, module: torch.nn.Module, memory: set[int]) -> None:
        # Addresses are noted: a module that another thread uses cannot be read.
        if module in self._memory or any(memory & m for m in self._memory.values()):
            raise JobError(
                "returned the same weights twice, but sites that train at the same "
                "time need separate models: build a new module in every call, or set "
                "simulation.workers = 1",
                key="model.factory",
            )


class _Snapshot:
    """What a module holds besides its state: modes, hooks, caches, counters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._attributes = [(vars(m), dict(vars(m))) for m in module.modules()]
        self._contents = [
            (value, copy.copy(value))
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in {dict, OrderedDict, list, set}
        ]
        state = module.state_dict().keys()
        self._buffers = [
            (tensor, tensor.detach().clone())
            for name, tensor in module.named_buffers()
            if name not in state
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back in its place, without new objects."""
        for attributes, before in self._attributes:
            _refill(attributes, before)
        for container, content in self._contents:
            if container or content:  # Most are for hooks that nobody has.
                _refill(container, content)
        for tensor, values in self._buffers:
            # Instances may share a constant: it is written to only if it changed.
            if not torch.equal(tensor, values):
                tensor.copy_(values)


def _refill(container: Any, content: Any) -> None:
    """Restore a container's content; an unchanged one is not written."""
    if _holds(container, content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _holds(container: Any, content: Any) -> bool:
    """Whether a container holds these very objects: tensors cannot be compared."""
    if isinstance(container, set):
        return bool(container == content)
    if len(container) != len(content) or not all(map(is_, container, content)):
        return False
    if isinstance(container, dict):
        return all(map(is_, container.values(), content.values()))
    return True


def _check_finite(layout: Layout, module: torch.nn.Module) -> None:
    state = module.state_dict()
    for spec in layout.tensors:
        if spec.role not in AVERAGED:
            continue
        if not np.isfinite(state[spec.name].detach().float().cpu().numpy()).all():
            raise JobError(
                f"{spec.name!r} of the model contains NaN or infinite values at the "
                "start, which cannot be averaged; make a constant such as a mask a "
                "buffer with persistent=False",
                key="model.factory",
            )


def _device(name: str) -> torch.device:
    """Resolve the job's device; without a number it is the first of its kind.

    Raises:
        JobError: It names a CUDA device that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise JobError(
            f"this machine has {torch.cuda.device_count()} CUDA devices and no "
            f"{name!r}; use auto or cpu",
            key="training.device",
        )
    return device
