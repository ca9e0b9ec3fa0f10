"""Tests whether a model keeps the records of a batch apart.

DP-SGD bounds what one record adds to a sum of gradients. The bound is void if a record
also changes the gradients of others, as with ``x - x.mean(0)``. Which operations a
module uses cannot be read from outside, so copies of the model are run: the same
records beside others, beside extreme ones, in a smaller batch and alone. What each
layer gets of a record, and the gradient by what it gives, are all that the record's
gradient is computed from. They must agree between the runs, and so must the results.

Before each of these runs the copy sees other records in a batch of their own, so that a
module that remembers records in an attribute is found too. The gradients of extreme
records are large, so that one that is scaled by those of others is found. A module that
changes its own trained weights, or draws from a generator of its own, is refused.

This is a test and not a proof. A module that mixes records only for some values, in
some batch or after some number of calls may pass. Of a model that draws random numbers
in evaluation too, batches of other sizes are not compared. For a model that keeps
records apart, the outcome depends on no record.

Shape suffixes: B records.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from federation.errors import JobError
from federation.tree import Tree, leaves, map_tree, num_records
from privacy.dp_sgd.capture import backprops_of, watched
from privacy.dp_sgd.layers import trained_layers

Forward = Callable[[nn.Module, Tree], object]
"""Applies a model, and perhaps its objective, to a batch."""

Draws = Callable[[int], AbstractContextManager[object]]
"""Seeds the global generators for a block, and puts them back after it."""

_KEY = "model.factory"
_BASE = 3  # records that are compared
_BESIDE = 3  # records beside them
_ATTEMPTS = 3  # Each with other records and weights: rounding differs once, not always.
_EXTREME = 1000.0  # times the largest value
_WEIGHT_NOISE = 0.05  # times a parameter's root mean square
_LEAST_NOISE = 0.02  # for parameters that begin at zero
_CANCELLED = 0.01  # Gradients below this part of the largest one are rounding, maybe.
_SAME_SHAPE = 1 / 32  # Kernels of one shape treat a row alike, beside any others.
_STATES: dict[type[Any], Callable[[Any], object]] = {
    torch.Generator: lambda generator: generator.get_state().tolist(),
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(),
    random.Random: lambda generator: generator.getstate(),
}


def check_records_apart(
    module: nn.Module,
    inputs: Tree,
    forward: Forward,
    *,
    draws: Draws,
    gradients: bool = True,
) -> None:
    """Compare a model's results for some records in different batches.

    Neither the model nor any generator is changed.

    Args:
        module: From ``fit_for_privacy``, in the mode in which it will be used.
        inputs: Some records, at least 2: tensors of shape ``(B, ...)``.
        forward: Applies a model to inputs, and perhaps an objective; gives results of
            each record, shape ``(B, ...)``.
        draws: Seeds what the model may draw from.
        gradients: Compare gradients too, not only results.

    Raises:
        JobError: One record changes what the model makes of another; the message
            names the module, if it can be found.
    """
    found = None
    for attempt in range(_ATTEMPTS):
        records = _rolled(inputs, _BASE * attempt)
        found = _Probe(
            module=module,
            inputs=records,
            forward=forward,
            draws=draws,
            seed=attempt,
            gradients=gradients,
        ).run()
        if found is None:
            return
    raise _mixing(module, *(found or ("", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waypoint:
    """A tensor inside a model.

    Attributes:
        name: Name of the module.
        kind: ``input`` or ``output`` of any module; ``layer`` for what a trained layer
            was called with, ``gradient`` by what it gave, ``result`` of the model.
        values: Shape ``(B, ...)``.
    """

    name: str
    kind: str
    values: torch.Tensor

    @property
    def decides(self) -> bool:
        """Whether a record's gradient, or its loss, is computed from it."""
        return self.kind not in ("input", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Records of one run.

    Attributes:
        before: Records that the model sees first.
        records: Records that it sees then.
        rows: Where the compared ones are among them.
        loudness: What the gradients of all others are multiplied by.
    """

    before: Tree
    records: Tree
    rows: slice
    loudness: float = 1.0


@dataclass(slots=True)
class _Trace:
    """The tensors of a run, and whether it drew random numbers."""

    seen: list[_Waypoint] = field(default_factory=list)
    drew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Runs of one model on one choice of records; see ``check_records_apart``."""

    module: nn.Module
    inputs: Tree
    forward: Forward
    draws: Draws
    seed: int
    gradients: bool

    @property
    def base(self) -> Tree:
        """Records that are compared."""
        return _rows(self.inputs, slice(_BASE))

    @property
    def beside(self) -> Tree:
        """Records beside them: others, as far as there are any."""
        times = -(-_BESIDE // num_records(self.inputs))
        others = _rolled(self.inputs, _BASE)
        return _rows(_joined(*[others] * times), slice(_BESIDE))

    def run(self) -> tuple[str, str] | None:
        """Return which module mixes records and how that shows, or None."""
        beside = self.beside
        expected = self._trace(self._beside_base(beside))
        rows = slice(0, num_records(self.base))
        for extreme in _extremes(self.inputs):
            batch = self._beside_base(_joined(*[extreme] * _BESIDE), _EXTREME)
            trace = self._trace_if_possible(batch, quiet=False)
            if trace is not None:
                found = _difference(expected, rows, trace, rows, _SAME_SHAPE)
                if found is not None:
                    return found
        return self._compare_sizes(expected)

    def _compare_sizes(self, expected: _Trace) -> tuple[str, str] | None:
        # A batch of another size draws other masks, so that none may be drawn here.
        quiet = expected.drew
        if quiet:
            expected = self._trace(self._beside_base(self.beside), quiet=True)
            if expected.drew:
                return None
        for batch, among in self._other_sizes():
            trace = self._trace_if_possible(batch, quiet=quiet)
            if trace is None:
                raise JobError(
                    f"the model fails on a batch of {num_records(batch.records)} "
                    f"records, although it takes {_BESIDE + num_records(self.base)}: a "
                    "private step may draw any number of records, so the model must "
                    "accept any number",
                    key=_KEY,
                )
            found = _difference(expected, among, trace, batch.rows, 1.0)
            if found is not None:
                return found
        return None

    def _beside_base(self, beside: Tree, loudness: float = 1.0) -> _Pass:
        base = self.base
        return _Pass(
            before=beside,
            records=_joined(base, beside),
            rows=slice(0, num_records(base)),
            loudness=loudness,
        )

    def _other_sizes(self) -> Iterator[tuple[_Pass, slice]]:
        """Smaller batches and another order, and the rows of the first run."""
        base, beside = self.base, self.beside
        rows, one = slice(0, num_records(base)), slice(0, 1)
        yield _Pass(before=beside, records=base, rows=rows), rows
        yield _Pass(before=beside, records=_rows(base, one), rows=one), one
        behind = _joined(beside, base)
        place = slice(num_records(beside), num_records(behind))
        yield _Pass(before=beside, records=behind, rows=place), rows

    def _trace_if_possible(self, batch: _Pass, *, quiet: bool) -> _Trace | None:
        try:
            return self._trace(batch, quiet=quiet)
        except JobError:
            raise
        except Exception:  # noqa: BLE001 - the user's code may raise anything.
            return None

    def _trace(self, batch: _Pass, *, quiet: bool = False) -> _Trace:
        """Run a copy of the model on a batch."""
        module = self._copy()
        if quiet:
            _silence(module)
        trace = self._look_again(module, batch)
        if quiet and trace.drew:  # Functions draw too, and in training mode only.
            trace = self._look_again(module.eval(), batch)
        return trace

    def _look_again(self, module: nn.Module, batch: _Pass) -> _Trace:
        frozen = [p for p in module.parameters() if not p.requires_grad]
        kept = [(t, t.detach().clone()) for t in (*module.buffers(), *frozen)]
        trained = [  # Of the model too: a hook of a closure may write to it.
            (name, p, p.detach().clone())
            for each in (module, self.module)
            for name, p in each.named_parameters()
            if p.requires_grad
        ]
        trace, device = _Trace(), next(leaves(batch.records)).device
        with self.draws(1 + self.seed), torch.set_grad_enabled(self.gradients):
            before, own = _generator_states(device), _own_states(module)
            self.forward(module, batch.before)
            _put_back(kept)
            self._look(module, batch, trace)
            _put_back(kept)
            trace.drew = before != _generator_states(device)
        _check_unchanged(trained)
        for name, state in _own_states(module).items():
            if state != own.get(name, state):
                raise JobError(
                    f"{name!r} of the model is a random generator of its own, whose "
                    "draws others could repeat: draw from torch's global generator, "
                    "which private steps give secret states",
                    key=_KEY,
                )
        return trace

    def _copy(self) -> nn.Module:
        """A copy with other weights: no part of it is zero and out of sight."""
        try:
            module = copy.deepcopy(self.module)
        except Exception as error:  # The user's class may raise anything.
            raise JobError(
                "the model cannot be copied, but private steps test a copy first "
                f"({type(error).__name__}): do not store locks, files or results of "
                "earlier calls in its attributes",
                key=_KEY,
            ) from error
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    size = parameter.detach().double().square().mean().sqrt().item()
                    noise = torch.randn(parameter.shape, generator=generator)
                    noise *= _WEIGHT_NOISE * size if size > 0 else _LEAST_NOISE
                    parameter.add_(noise.to(parameter))
        return module

    def _look(self, module: nn.Module, batch: _Pass, trace: _Trace) -> None:
        records, size = batch.records, num_records(batch.records)
        layers = trained_layers(module) if self.gradients else {}
        with _noting(module, size, trace.seen), watched(layers, size) as uses:
            result = self.forward(module, records)
        trace.seen += [
            _Waypoint(name=use.name, kind="layer", values=use.inputs) for use in uses
        ]
        if not isinstance(result, torch.Tensor) or result.shape[:1] != (size,):
            return  # Training says what is wrong with it.
        kept = result.detach().clone()
        trace.seen.append(_Waypoint(name="", kind="result", values=kept))
        if not self.gradients or not result.requires_grad:
            return
        # Any loss that sees each result for itself does; this one cancels nothing.
        factors = torch.randn(
            result.shape[1:], generator=torch.Generator().manual_seed(self.seed)
        )
        loudness = torch.full((size,) + (1,) * (result.ndim - 1), batch.loudness)
        loudness[batch.rows] = 1.0
        total = (result * factors.to(result) * loudness.to(result)).sum()
        for use, values in zip(uses, backprops_of(total, uses), strict=True):
            if values is not None:
                trace.seen.append(
                    _Waypoint(name=use.name, kind="gradient", values=values)
                )


@contextmanager
def _noting(module: nn.Module, size: int, seen: list[_Waypoint]) -> Iterator[None]:
    """Note what goes into every module and what comes out, by record."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: object, kwargs: object, out: object) -> None:
            for kind, values in (("input", (args, kwargs)), ("output", out)):
                for tensor in leaves(values):
                    is_tensor = isinstance(tensor, torch.Tensor) and tensor.ndim
                    if is_tensor and len(tensor) == size:
                        kept = tensor.detach().clone()
                        seen.append(_Waypoint(name=name, kind=kind, values=kept))

        return hook

    handles = [
        layer.register_forward_hook(hook_of(name), with_kwargs=True)
        for name, layer in module.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(records: Tree, rows: slice) -> Tree:
    return map_tree(lambda values: values[rows], records)


def _rolled(records: Tree, places: int) -> Tree:
    return map_tree(lambda values: values.roll(-places, 0), records)


def _joined(*records: Tree) -> Tree:
    return map_tree(lambda *values: torch.cat(values), *records)


def _extremes(records: Tree) -> tuple[Tree, Tree]:
    """Two records of small and of large values: see ``_extreme``."""
    return (
        map_tree(lambda values: _extreme(values)[0], records),
        map_tree(lambda values: _extreme(values)[1], records),
    )


def _extreme(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Small and large values, shape ``(1, ...)``.

    Whole numbers may be tokens or classes, of which a model takes only so many: where
    all records have some, no record gets another one.
    """
    low, high = inputs.amin(0, keepdim=True), inputs.amax(0, keepdim=True)
    if not inputs.is_floating_point():
        return low, high
    is_whole = (inputs == inputs.round()).all(0, keepdim=True)
    far = _EXTREME * inputs.abs().amax(0, keepdim=True)
    return torch.where(is_whole, low, -far), torch.where(is_whole, high, far)


@torch.no_grad()
def _put_back(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    # As private steps do after every batch.
    for tensor, values in kept:
        tensor.copy_(values)


def _silence(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, _DropoutNd):
            layer.eval()


def _check_unchanged(trained: list[tuple[str, nn.Parameter, torch.Tensor]]) -> None:
    for name, parameter, before in trained:
        if not torch.equal(parameter.nan_to_num(), before.nan_to_num()):
            raise JobError(
                f"{name!r} of the model is trained, and the model or a hook changes it "
                "when it is called: that would reach the weights without noise; change "
                "weights in no forward pass, hook or parametrisation",
                key=_KEY,
            )


def _generator_states(device: torch.device) -> list[object]:
    """States of torch's generators, which a model may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


def _own_states(module: nn.Module) -> dict[str, str]:
    """States of the generators that a model has in its attributes, by name."""
    own = {
        f"{place}.{name}".lstrip("."): value
        for place, layer in module.named_modules()
        for name, value in vars(layer).items()
    }
    return {
        name: repr(read(value))
        for name, value in own.items()
        for kind, read in _STATES.items()
        if isinstance(value, kind)
    }


def _difference(
    one: _Trace, one_rows: slice, other: _Trace, other_rows: slice, part: float
) -> tuple[str, str] | None:
    """Compare two runs; return the module that mixes records and how that shows."""
    deciding = [[s for s in trace.seen if s.decides] for trace in (one, other)]
    if [(s.name, s.kind) for s in deciding[0]] != [
        (s.name, s.kind) for s in deciding[1]
    ]:
        return "", "calls different layers"
    pairs = [
        (a, a.values[one_rows], b.values[other_rows])
        for a, b in zip(*deciding, strict=True)
    ]
    gradients = [a for seen, a, _ in pairs if seen.kind == "gradient"]
    largest = max((_norms(_finite(a)).max().item() for a in gradients), default=0.0)
    tolerance = part * _tolerance([a for _, a, _ in pairs])
    for seen, a, b in pairs:
        floor = _CANCELLED * largest if seen.kind == "gradient" else 0.0
        if _differ(a, b, tolerance, floor):
            return _culprit(one, one_rows, other, other_rows, tolerance) or (
                seen.name,
                "gets a different gradient"
                if seen.kind == "gradient"
                else "gives a different result",
            )
    return None


def _culprit(
    one: _Trace, one_rows: slice, other: _Trace, other_rows: slice, tolerance: float
) -> tuple[str, str] | None:
    """Find the first module with the same inputs but different outputs."""
    notes = [[s for s in t.seen if s.kind in ("input", "output")] for t in (one, other)]
    if [(s.name, s.kind) for s in notes[0]] != [(s.name, s.kind) for s in notes[1]]:
        return None
    got_the_same: dict[str, bool] = {}
    for a, b in zip(*notes, strict=True):
        differs = _differ(a.values[one_rows], b.values[other_rows], tolerance, 0.0)
        if a.kind == "input":
            got_the_same[a.name] = got_the_same.get(a.name, True) and not differs
        elif differs and got_the_same.get(a.name):
            return a.name, "gives a different result"
    return None


def _differ(a: torch.Tensor, b: torch.Tensor, tolerance: float, floor: float) -> bool:
    """Whether any record's values differ by more than rounding."""
    if a.shape != b.shape:
        return True
    a, b = _flat(a).double(), _flat(b).double()
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return True
    a, b = _finite(a), _finite(b)
    apart = _norms(a - b)
    scale = max(_norms(a).max().item(), _norms(b).max().item(), floor)
    return bool((apart > tolerance * scale).any())


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1) if values.ndim > 1 else values[:, None]


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _norms(values: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(_flat(values), dim=1)
    return norms


def _tolerance(values: list[torch.Tensor]) -> float:
    """Half of the digits of the coarsest type."""
    kinds = {v.dtype for v in values if v.is_floating_point()}
    coarsest = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return float(coarsest**0.5)


def _mixing(module: nn.Module, name: str, how: str) -> JobError:
    kind = type(module.get_submodule(name)).__name__
    who = (
        f"{name!r} (a {kind})"
        if name
        else f"the model (a {kind}), between its layers or in the objective,"
    )
    return JobError(
        f"{who} {how} for a record when the batch has other records: differential "
        "privacy needs each record processed on its own; compute along a record's own "
        "axes, not along the first axis, which counts the records",
        key=_KEY,
    )
