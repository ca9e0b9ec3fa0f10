"""One site of torchft's DiLoCo, which the study runs where torchft is installed.

The inner steps are those of the other methods; ``torchft.local_sgd.DiLoCo`` averages
pseudo-gradients every ``LOCAL_STEPS`` of them by gloo's all-reduce, and its lighthouse,
at the first site, says who takes part.
"""

from datetime import timedelta
from typing import Any

import torch
from baseline_rank import Count, Site
from exchanges import ring_bytes
from torch import distributed, nn
from torch._C._distributed_c10d import TCPStore

LOCAL_STEPS, _OUTER_RATE, _OUTER_MOMENTUM = 30, 0.7, 0.9
_LIGHTHOUSE_PORT, _STORE_PORT, _MANAGER_PORT = 29_510, 29_520, 29_540


def local_steps(steps: int) -> int:
    """Steps of a period: a run has two of them at least, of which one is counted."""
    return min(LOCAL_STEPS, steps // 2)


def train(site: Site, steps: int) -> tuple[Count, nn.Module, float]:
    """Train; what steps took, the model, and bytes of a step each way by formula."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    every, own = local_steps(steps), site.hosts.addresses[site.rank]
    lighthouse: Any = None
    if site.rank == 0:
        bind = f"{own}:{_LIGHTHOUSE_PORT}"
        lighthouse = LighthouseServer(
            bind=bind, min_replicas=site.size, join_timeout_ms=60_000
        )
    distributed.barrier(group=site.group)
    store_port = _STORE_PORT + site.rank
    store = TCPStore(own, store_port, is_master=True)
    model, count = site.model(), Count(skip=every)
    optimizer = site.optimizer(model)
    outer = torch.optim.SGD(
        model.parameters(), lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True
    )
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=site.size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store_port,
        port=_MANAGER_PORT + site.rank,
        hostname=own,
        lighthouse_addr=f"http://{site.hosts.addresses[0]}:{_LIGHTHOUSE_PORT}",
        replica_id=f"site{site.rank}",
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120),
        init_sync=False,
    )
    try:
        with DiLoCo(
            manager,
            [model],
            optimizer,
            outer,
            sync_every=every,
            pin_memory=False,
        ):
            for number, loss in enumerate(site.losses(model, steps)):
                with site.times.training():
                    loss.backward()  # type: ignore[no-untyped-call]
                    site.step(model, optimizer, number)
                count.tick(site)
    finally:
        distributed.barrier(group=site.group)
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
        del store
    return count, model, ring_bytes(site.num_values, site.size) / every
