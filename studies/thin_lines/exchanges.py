"""How a step's gradients become one at all sites, and how many bytes that sends.

Each exchange works on flat float32 vectors through ``torch.distributed``, in place. Its
``bytes_each`` is a formula: payload that one site sends, and as many that it receives.
Shape suffixes: d values of the model, k values that are sent, w bytes of signs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import distributed

VALUE_BYTES, INDEX_BYTES, BITS = 4, 4, 8
_SIGN_BLOCK = 4096  # Values with one scale.


class Exchange(Protocol):
    """Makes the mean of all sites' gradients, or something near it."""

    def bytes_each(self, num_values: int, num_sites: int) -> float:
        """Bytes that a site sends, and receives, at every step."""
        ...

    def __call__(self, gradient_d: torch.Tensor) -> None:
        """Replace a site's gradient by the mean."""
        ...


def ring_bytes(num_values: int, num_sites: int) -> float:
    """``2 (n - 1) / n`` of a vector: Patarasuk and Yuan 2009, section 3."""
    return 2 * (num_sites - 1) / num_sites * VALUE_BYTES * num_values


@dataclass(frozen=True, slots=True)
class Ring:
    """Reduce-scatter around a ring, then all-gather around it."""

    group: distributed.ProcessGroup

    def bytes_each(self, num_values: int, num_sites: int) -> float:
        return ring_bytes(num_values, num_sites)

    def __call__(self, gradient_d: torch.Tensor) -> None:
        rank, size = self.group.rank(), self.group.size()
        parts = list(gradient_d.tensor_split(size))
        for turn in range(size - 1):
            had = self._pass_on(parts[(rank - turn) % size], parts, rank - turn - 1)
            parts[(rank - turn - 1) % size].add_(had)
        parts[(rank + 1) % size].div_(size)
        for turn in range(size - 1):
            had = self._pass_on(parts[(rank - turn + 1) % size], parts, rank - turn)
            parts[(rank - turn) % size].copy_(had)

    def _pass_on(
        self, part: torch.Tensor, parts: Sequence[torch.Tensor], coming: int
    ) -> torch.Tensor:
        """Send to the next site, and receive from the one before."""
        rank, size = self.group.rank(), self.group.size()
        had = torch.empty_like(parts[coming % size])
        sending = distributed.isend(part, (rank + 1) % size)
        distributed.recv(had, (rank - 1) % size)
        if sending is not None:
            sending.wait()
        return had


@dataclass(frozen=True, slots=True)
class Tree:
    """Recursive doubling: whole vectors with log2 of the sites, one after another."""

    group: distributed.ProcessGroup

    def bytes_each(self, num_values: int, num_sites: int) -> float:
        return math.log2(num_sites) * VALUE_BYTES * num_values

    def __call__(self, gradient_d: torch.Tensor) -> None:
        rank, size = self.group.rank(), self.group.size()
        if size & (size - 1):
            raise ValueError(f"recursive doubling needs 2, 4, 8, ... sites, not {size}")
        had_d, distance = torch.empty_like(gradient_d), 1
        while distance < size:
            sending = distributed.isend(gradient_d, rank ^ distance)
            distributed.recv(had_d, rank ^ distance)
            if sending is not None:
                sending.wait()
            gradient_d.add_(had_d)
            distance *= 2
        gradient_d.div_(size)


@dataclass(frozen=True, slots=True)
class Star:
    """A parameter server: a host that adds up gradients and returns what follows.

    It returns the mean here, which is as long as the parameters that others return.
    ``serve_star`` is the server's half.
    """

    server: int

    def bytes_each(self, num_values: int, num_sites: int) -> float:
        del num_sites  # A site's line does not know how many there are.
        return VALUE_BYTES * num_values

    def __call__(self, gradient_d: torch.Tensor) -> None:
        distributed.send(gradient_d, self.server)
        distributed.recv(gradient_d, self.server)


def serve_star(num_sites: int, num_values: int) -> None:
    """Serve one step of the sites of ``Star``: hosts 0, 1, and so on."""
    had_nd = [torch.empty(num_values) for _ in range(num_sites)]
    coming = [distributed.irecv(had_d, i) for i, had_d in enumerate(had_nd)]
    for each in coming:
        if each is not None:
            each.wait()
    mean_d = torch.stack(had_nd).mean(0)
    going = [distributed.isend(mean_d, i) for i in range(num_sites)]
    for work in going:
        if work is not None:
            work.wait()


@dataclass(frozen=True, slots=True)
class TopK:
    """The largest values of gradient and residual: Lin et al. 2018, arXiv:1712.01887.

    Indices and values go to all sites; what was not sent stays in the residual.
    """

    group: distributed.ProcessGroup
    density: float
    residual: list[torch.Tensor] = field(default_factory=list)

    def _count(self, num_values: int) -> int:
        return math.ceil(self.density * num_values)

    def bytes_each(self, num_values: int, num_sites: int) -> float:
        count = self._count(num_values)
        return (num_sites - 1) * count * (VALUE_BYTES + INDEX_BYTES)

    def __call__(self, gradient_d: torch.Tensor) -> None:
        if not self.residual:
            self.residual.append(torch.zeros_like(gradient_d))
        left_d, size = self.residual[0], self.group.size()
        left_d.add_(gradient_d)
        index_k = left_d.abs().topk(self._count(left_d.numel())).indices
        value_k = left_d[index_k]
        left_d[index_k] = 0
        # One message: bits of the indices in place of floats.
        mine = torch.stack((index_k.int().view(torch.float32), value_k))
        all_n = [torch.empty_like(mine) for _ in range(size)]
        distributed.all_gather(all_n, mine, group=self.group)
        gradient_d.zero_()
        for index_f, value in all_n:
            gradient_d.index_add_(0, index_f.view(torch.int32), value / size)


@dataclass(frozen=True, slots=True)
class OneBit:
    """Signs and a scale for each block, with residual: Seide et al. 2014, section 3."""

    group: distributed.ProcessGroup
    residual: list[torch.Tensor] = field(default_factory=list)

    def bytes_each(self, num_values: int, num_sites: int) -> float:
        blocks = math.ceil(num_values / _SIGN_BLOCK)
        one = blocks * (_SIGN_BLOCK // BITS + VALUE_BYTES)
        return float((num_sites - 1) * one)

    def __call__(self, gradient_d: torch.Tensor) -> None:
        size, num = self.group.size(), gradient_d.numel()
        blocks = math.ceil(num / _SIGN_BLOCK)
        if not self.residual:
            self.residual.append(torch.zeros(blocks * _SIGN_BLOCK))
        left_d = self.residual[0]
        left_d[:num].add_(gradient_d)
        left_b = left_d.view(blocks, _SIGN_BLOCK)
        scale_b = left_b.abs().mean(1)
        is_positive_b = left_b >= 0
        left_b.sub_(_signed(is_positive_b, scale_b))
        mine_w = torch.cat((_packed(is_positive_b), scale_b.view(torch.uint8)))
        all_n = [torch.empty_like(mine_w) for _ in range(size)]
        distributed.all_gather(all_n, mine_w, group=self.group)
        mean_b = torch.zeros_like(left_b)
        for had_w in all_n:
            end = blocks * _SIGN_BLOCK // BITS
            signs_b = _unpacked(had_w[:end]).view(blocks, _SIGN_BLOCK)
            mean_b += _signed(signs_b, had_w[end:].clone().view(torch.float32))
        gradient_d.copy_(mean_b.view(-1)[:num] / size)


def _signed(is_positive_b: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    return torch.where(is_positive_b, scale_b[:, None], -scale_b[:, None])


def _packed(bits: torch.Tensor) -> torch.Tensor:
    weights = 2 ** torch.arange(BITS, dtype=torch.uint8)
    return (bits.view(-1, BITS).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(BITS, dtype=torch.uint8)
    return ((words[:, None] >> shifts) & 1).bool().view(-1)
