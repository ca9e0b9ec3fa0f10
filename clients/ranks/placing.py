"""Where a rank's model is: whole on its device, or only this rank's part of it.

Parts are those of FSDP2 (``fully_shard``; Zhao et al. 2023, arXiv:2304.11277): each
rank holds an equal number of rows of every parameter, with their gradients and the
optimiser's state, and a layer is whole only while it computes. ``torch.compile`` is
here too, since it must come before the cut.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from clients.ranks.peers import Peers

_LOG = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def place_(module: nn.Module, peers: Peers, *, compiled: bool) -> None:
    """Put a new model where it trains.

    Args:
        module: The model, whole and in host memory.
        peers: The site's ranks; all of them place the same model.
        compiled: Whether ``torch.compile`` is to be used; see ``can_compile``.
    """
    units = list(units_of(module)) if peers.is_sharded else []
    if compiled:
        # The layers inside the hooks that gather and free them; else all at once.
        for unit in units or [module]:
            _compile_(unit)
    if peers.is_sharded:
        _shard_(module, units, peers)
    else:
        module.to(peers.device)


def units_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that are gathered one after the other.

    They are the members of the outermost lists of modules. What is in none, or shares
    a parameter with the rest of the model, belongs to the model as a whole.
    """
    owners = _num_owners(module)
    for unit in _members(module):
        inside = _num_owners(unit)
        if inside and all(owners[key] == count for key, count in inside.items()):
            yield unit


def can_compile(device: torch.device) -> bool:
    """Whether ``torch.compile`` works here; if not, the log says so in one line.

    It is tried out: what it needs (a C++ compiler on the CPU, Triton on a GPU) is known
    to it alone.
    """
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 -- seconds

    def small(x_d: torch.Tensor) -> torch.Tensor:
        return (x_d * x_d).sum()

    try:
        torch.compile(small)(torch.ones(2, device=device))
    except TorchDynamoException as error:
        reason, _, _ = str(error).partition("\n")
        _LOG.warning("torch.compile does not work here, so it is not used: %s", reason)
        return False
    return True


def _compile_(module: nn.Module) -> None:
    forward = module.forward

    # ``nn.Module.compile`` compiles no module of torch's own (2.13): dynamo looks at no
    # function that is defined in torch. This one is ours.
    def of_ours(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    module.forward = torch.compile(of_ours)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _members(child)


def _num_owners(module: nn.Module) -> Counter[int]:
    """How many modules in here hold each parameter, by its address."""
    modules = module.modules()
    return Counter(id(p) for m in modules for p in m.parameters(recurse=False))


def _shard_(module: nn.Module, units: list[nn.Module], peers: Peers) -> None:
    # Imported where it is used: it takes more than a second.
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    group = distributed.group.WORLD
    assert group is not None  # noqa: S101 -- see ``Peers``
    mesh = DeviceMesh.from_group(group, peers.device.type)
    # Each unit moves to the device and is cut there before the next one comes. After a
    # forward pass parts alone are left, also of the last layers: between rounds and
    # after an evaluation weights are written to them.
    for unit in (*units, module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
