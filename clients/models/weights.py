"""Convert a torch module to flat vectors and back.

Shape suffixes: d float values of the model, m integer values of the model.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from clients.models import personal
from federation.errors import JobError, LayoutMismatch
from federation.job.adapters import Factors
from federation.mapped import give_back
from federation.vectors import AVERAGED, IntegerVector, Layout, Role, Vector

_INTEGER_TYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


def layout_of(
    module: torch.nn.Module,
    integer_buffers: Mapping[str, str],
    *,
    personal_patterns: Sequence[str] = (),
    sends_frozen: bool = False,
) -> Layout:
    """Lay out a module's state: each tensor once, tied weights under one name.

    Args:
        module: Any module.
        integer_buffers: Role by name pattern, see ``ModelSpec.integer_buffers``.
        personal_patterns: What stays at each site, see ``ModelSpec.personal``.
        sends_frozen: Whether parameters that require no gradient travel all the same,
            for sites whose code is given a whole model.

    Raises:
        JobError: A tensor is of a kind that cannot travel, a pattern fits none, or
            there is nothing to train or to share.
    """
    parameters = parameters_by_name(module)
    rows, unused, unused_personal = [], set(integer_buffers), set(personal_patterns)
    exact = exact_factors(module)
    from_server = {each.weight for each in exact if not each.refactored}
    distinct = _distinct(module)
    for name, tensor in distinct.items():
        parameter = parameters.get(name)
        if name in from_server:
            role = Role.SERVER
        elif parameter is not None and not (parameter.requires_grad or sends_frozen):
            role = Role.FROZEN
        elif fitting := personal.match(name, personal_patterns):
            role = Role.PERSONAL if tensor.is_floating_point() else Role.KEEP
            unused_personal -= fitting
        elif tensor.is_floating_point():
            role = Role.PARAMETER if name in parameters else Role.BUFFER
        else:
            role, pattern = _integer_role(name, integer_buffers)
            unused.discard(pattern)
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, tuple(tensor.shape), dtype, role))
    if unused:
        raise JobError(
            f"no integer or boolean buffer of the model is called {min(unused)!r}",
            key="model.integer_buffers",
        )
    if not any(p.requires_grad and p.numel() for p in parameters.values()):
        raise JobError(
            "the model has nothing to train: it needs a floating-point parameter "
            "that requires a gradient",
            key="model.factory",
        )
    loaded = {name for name, _, _, role in rows if role is not Role.FROZEN}
    _check_memory(module, {n: t for n, t in distinct.items() if n in loaded})
    _check_tied(module, personal_patterns)
    _check_personal(unused_personal, {role for *_, role in rows})
    layout = Layout.build(rows)
    return replace(layout, frozen=frozen_digest(module, layout))


def _check_personal(unused: set[str], roles: set[Role]) -> None:
    if unused:
        raise JobError(
            f"nothing that the model trains is called {min(unused)!r}",
            key="model.personal",
        )
    if Role.PARAMETER not in roles:
        raise JobError(
            "all parameters that the model trains are personal, so the sites would "
            "share nothing: name fewer",
            key="model.personal",
        )


def parameters_by_name(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Find a module's parameters by their names in its state, tied ones by each.

    Hooks of ``state_dict`` may rename tensors, as ``checkpoint_wrapper`` of torch does,
    so memory identifies a parameter. One that the state leaves out has its own name.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    by_memory = {_memory(name, parameter): parameter for name, parameter in own.items()}
    memories = {
        name: _memory(name, tensor)
        for name, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    in_state = set(memories.values())
    left_out = {n: p for n, p in own.items() if _memory(n, p) not in in_state}
    return left_out | {
        name: by_memory[memory]
        for name, memory in memories.items()
        if memory in by_memory
    }


def _check_memory(module: torch.nn.Module, loaded: Mapping[str, torch.Tensor]) -> None:
    """Check that values loaded into a module's state are those that it trains.

    Args:
        module: Its state is read a second time, while ``loaded`` keeps the first.
        loaded: Tensors of its state that are loaded in every round.

    Raises:
        JobError: A hook copies or drops a tensor, or two share memory.
    """
    fault = ""
    again = {_memory(name, tensor) for name, tensor in module.state_dict().items()}
    for name, tensor in loaded.items():
        if _memory(name, tensor) not in again:
            fault = f"returns a copy as {name!r}, so that loading it has no effect"
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and _memory(name, parameter) not in again:
            fault = f"does not hold the trained parameter {name!r} itself"
    if fault:
        raise JobError(
            f"state_dict() of the model {fault}: let its hooks and get_extra_state() "
            "rename tensors at most, and return every trained one",
            key="model.factory",
        )
    if pair := _overlapping(loaded):
        raise JobError(
            f"{pair[1]!r} of the model shares memory with {pair[0]!r}, but not all of "
            "it in the same form: make them one parameter, or clone one",
            key="model.factory",
        )


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Find two tensors that have memory in common.

    Two with gaps, such as columns of one matrix, may reach into each other.
    """
    farthest = farthest_dense = (0, "")  # Ends of the tensors before, with names.
    whole = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    for name, tensor in sorted(whole.items(), key=lambda item: item[1].data_ptr()):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        is_dense = extent == tensor.numel()
        end, other = farthest if is_dense else farthest_dense
        if tensor.data_ptr() < end:
            return other, name
        own = (tensor.data_ptr() + extent * tensor.itemsize, name)
        farthest = max(farthest, own)
        farthest_dense = max(farthest_dense, own) if is_dense else farthest_dense
    return None


def _check_tied(module: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a pattern for weights that travel under another of their names."""
    first: dict[object, str] = {}
    for name, tensor in module.state_dict().items():
        known = first.setdefault(_memory(name, tensor), name)
        if personal.match(name, patterns) and not personal.match(known, patterns):
            raise JobError(
                f"{name!r} shares its values with {known!r}, which is not personal: "
                "name both, or neither",
                key="model.personal",
            )


def exact_factors(module: torch.nn.Module) -> tuple[Factors, ...]:
    """Adapters whose products the aggregator averages, if the model has any."""
    found: tuple[Factors, ...] = getattr(module, "exact_factors", ())
    return found


def frozen_digest(module: torch.nn.Module, layout: Layout) -> str:
    """SHA-256 of the frozen tensors' names and bytes; empty if none is frozen.

    Of a sharded module it is that of the rows which this process holds.
    """
    state, found, names = module.state_dict(), hashlib.sha256(), layout.frozen_names
    for name in names:
        held, _ = _held(state[name])
        flat = held.detach().cpu().contiguous().reshape(-1)
        found.update(f"{name}\0{flat.numel()}\0".encode())
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest() if names else ""


def frozen_arrays(module: torch.nn.Module, layout: Layout) -> dict[str, NDArray[Any]]:
    """Copy the frozen tensors out, in types that NumPy has."""
    state = module.state_dict()
    found: dict[str, NDArray[Any]] = {}
    for name in layout.frozen_names:
        tensor = state[name].detach().cpu()
        wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor.clone()
        found[name] = wide.numpy()
    return found


def _integer_role(name: str, roles: Mapping[str, str]) -> tuple[Role, str]:
    for pattern, role in roles.items():
        if fnmatchcase(name, pattern):
            return Role(role), pattern
    counter = name.endswith("num_batches_tracked")
    return (Role.MAX if counter else Role.FROM_SERVER), ""


def _distinct(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the module's state, each memory once, in the module's order."""
    seen, distinct = set(), {}
    for name, tensor in module.state_dict().items():
        _check_travels(name, tensor)
        memory = _memory(name, tensor)
        if memory not in seen:
            seen.add(memory)
            distinct[name] = tensor
    return distinct


def _memory(name: str, tensor: torch.Tensor) -> object:
    """What tensors have in common that are one, under several names.

    Without memory of its own, a tensor is identified by its name.
    """
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return name
    held, _ = _held(tensor)
    if held.is_meta or held.numel() == 0:
        return name
    return held.data_ptr(), held.shape, held.stride(), held.dtype


def state_of(module: torch.nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the state of a module that may have run since it was laid out.

    Raises:
        JobError: A tensor has appeared, gone or changed its shape.
    """
    state: dict[str, torch.Tensor] = module.state_dict()
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    known = {_memory(name, state[name]) for name in shapes if name in state}
    late = [
        n for n, t in state.items() if n not in shapes and _memory(n, t) not in known
    ]
    gone = [n for n in shapes if n not in state]
    other = [n for n in shapes if n in state and tuple(state[n].shape) != shapes[n]]
    if not (late or gone or other):
        return state
    name = (late + gone + other)[0]
    was, now = (
        shapes.get(name, "missing"),
        tuple(state[name].shape) if name in state else "missing",
    )
    raise JobError(
        f"{name!r} of the model is {now} after training or evaluation, and was {was} "
        "when the factory returned it, so sites cannot train or send it: make all "
        "layers and buffers in __init__(), with their sizes; a cache can be a buffer "
        "with persistent=False",
        key="model.factory",
    )


def _check_travels(name: str, tensor: object) -> None:
    trouble = None
    if not isinstance(tensor, torch.Tensor):
        trouble = f"is a {type(tensor).__name__}: only tensors can be sent"
    elif is_lazy(tensor):
        trouble = "has no shape yet: give lazy layers their sizes"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        trouble = "is sparse or on the meta device: make it dense, with values"
    elif not tensor.is_floating_point() and tensor.dtype not in _INTEGER_TYPES:
        trouble = (
            f"is {tensor.dtype}: only real floating-point, integer and boolean "
            "tensors can be sent"
        )
    elif tensor.numel() and any(
        stride == 0 and size > 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        trouble = "repeats its memory: clone what expand() returned"
    if trouble is not None:
        raise JobError(f"{name!r} of the model {trouble}", key="model.factory")


def memory_of(module: torch.nn.Module) -> set[int]:
    """Addresses of the memory that holds the module's state."""
    return {
        _held(tensor)[0].untyped_storage().data_ptr()
        for tensor in module.state_dict().values()
        if tensor.numel()
    }


def is_rounded(layout: Layout) -> bool:
    """Whether the model holds fewer digits than the float32 vector."""
    exact = {"float32", "float64"}
    return any(t.dtype not in exact for t in layout.tensors if t.role in AVERAGED)


@torch.no_grad()
def load(
    module: torch.nn.Module,
    layout: Layout,
    weights_d: Vector,
    integers_m: IntegerVector,
) -> None:
    """Copy vectors into a module's tensors.

    Raises:
        LayoutMismatch: The vectors are not as long as the layout says.
    """
    sizes = (weights_d.shape, integers_m.shape)
    if sizes != ((layout.size,), (layout.num_integers,)):
        raise LayoutMismatch(
            f"got {weights_d.size} values and {integers_m.size} integers for a model "
            f"of {layout.size} and {layout.num_integers}"
        )
    state = module.state_dict()
    for spec, view in layout.float_views(weights_d):
        held, rows = _held(state[spec.name])
        if held.device.type == "cpu" and held.dtype == torch.float32:
            np.copyto(held.numpy(), view[rows])
        else:
            # Of a copy: torch warns about read-only arrays, and exports by DLPack
            # refuse them in older versions.
            held.copy_(torch.from_numpy(view[rows].copy()))
        give_back(view[rows])
    for integer_spec, integer_view in layout.integer_views(integers_m):
        state[integer_spec.name].copy_(torch.from_numpy(integer_view.copy()))


@torch.no_grad()
def read(module: torch.nn.Module, layout: Layout) -> tuple[Vector, IntegerVector]:
    """Copy a module's tensors out into new vectors.

    Of a sharded module the rows that other ranks hold stay 0; as nothing writes to
    them, they take no memory.
    """
    weights_d = np.zeros(layout.size, dtype=np.float32)
    integers_m = np.empty(layout.num_integers, dtype=np.int64)
    state = state_of(module, layout)
    for spec, view in layout.float_views(weights_d):
        held, rows = _held(state[spec.name])
        torch.from_numpy(view[rows]).copy_(held)
    for integer_spec, integer_view in layout.integer_views(integers_m):
        torch.from_numpy(integer_view).copy_(state[integer_spec.name])
    return weights_d, integers_m


def _held(tensor: Any) -> tuple[torch.Tensor, Any]:
    """Return this process's part of a tensor, and its rows.

    FSDP2 gives each rank an equal number of rows, rounded up, and the last ranks what
    is left. Its tensors are recognised by a method: importing their class is slow.
    """
    if not hasattr(tensor, "to_local"):
        return tensor, ...
    held: torch.Tensor = tensor.to_local()
    mesh = tensor.device_mesh
    start = -(-len(tensor) // mesh.size()) * mesh.get_local_rank()
    return held, slice(start, start + len(held))


def own_spans(
    module: torch.nn.Module, layout: Layout, *, is_first: bool
) -> tuple[tuple[int, int], ...]:
    """Places ``[start, stop)`` of the flat vector that this process is to write.

    Args:
        module: A model that every rank has, whole or in parts.
        layout: Layout of the whole model.
        is_first: Whether this is the first rank, which writes what all have.
    """
    state = module.state_dict()
    spans: list[tuple[int, int]] = []
    for spec, view in layout.float_views(np.empty(layout.size, dtype=np.float32)):
        _, rows = _held(state[spec.name])
        if rows is ...:
            if is_first:
                _append(spans, spec.offset, spec.offset + spec.size)
            continue
        row_size = spec.size // len(view)
        start, stop, _ = rows.indices(len(view))
        _append(spans, spec.offset + start * row_size, spec.offset + stop * row_size)
    return tuple(spans)


def _append(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a span, joined to the last one if they touch."""
    if start >= stop:
        return
    if spans and spans[-1][1] == start:
        start = spans.pop()[0]
    spans.append((start, stop))


def trained_spans(
    module: torch.nn.Module, layout: Layout
) -> tuple[tuple[int, int], ...]:
    """Places ``[start, stop)`` in the flat vector that training with gradients changes.

    Spans that touch are joined, so that large models have few of them.
    """
    trained = _trained(module)
    spans: list[tuple[int, int]] = []
    for spec, _ in layout.float_views(np.empty(layout.size, dtype=np.float32)):
        if spec.name in trained:
            _append(spans, spec.offset, spec.offset + spec.size)
    return tuple(spans)


def copy_untrained(
    module: torch.nn.Module, layout: Layout, *, source_d: Vector, out_d: Vector
) -> None:
    """Copy the values of all tensors that training with gradients does not change.

    Args:
        module: The model: says which parameters require a gradient.
        layout: Layout of the whole model.
        source_d: Shape ``(d,)``.
        out_d: Shape ``(d,)``; written to.
    """
    trained = _trained(module)
    pairs = zip(layout.float_views(source_d), layout.float_views(out_d), strict=True)
    for (spec, source), (_, out) in pairs:
        if spec.name not in trained:
            out[...] = source


def _trained(module: torch.nn.Module) -> set[str]:
    named = parameters_by_name(module).items()
    return {name for name, parameter in named if parameter.requires_grad}
