"""The relays of a simulated run."""

from collections.abc import Mapping

from aggregator.combine import combine_rule
from aggregator.relay import PlainRelay, SecureRelay
from aggregator.weighting import weight_of
from clients.training.local_federation import Federation
from cloud_adapters.local.relayed_grid import Combine, RelayedGrid, RelayLine
from federation.clock import VirtualClock
from federation.ids import SiteId
from federation.protocols import Clock, Grid
from federation.rounds import cost
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.identity import Identity


def relayed(
    grid: Grid,
    federation: Federation,
    clock: Clock,
    *,
    contract: Contract | None,
    identities: Mapping[SiteId, Identity],
) -> Grid:
    """Put the job's relays between the aggregator and the sites of a grid.

    Args:
        grid: Reaches the sites.
        federation: Job and model.
        clock: The aggregator's; only in virtual time do lines take time.
        contract: With secure aggregation, what all have agreed on.
        identities: With secure aggregation, those of the relays.
    """
    job = federation.job
    if not job.relays:
        return grid

    def combine_of(name: SiteId) -> Combine:
        if contract is not None:
            return SecureRelay(name=name, identity=identities[name], contract=contract)
        return PlainRelay(
            name=name,
            num_values=federation.pool.layout.size,
            layout_digest=federation.pool.layout.digest,
            weight_of=weight_of(job.aggregation.weights),
            combine=combine_rule(job.aggregation),
        )

    takes_time = isinstance(clock, VirtualClock)
    relays = []
    for relay in job.relays:
        speed = cost.relay_speed(job.simulation.relays, relay.name)
        line = {
            "down": speed.down_bytes_per_second,
            "up": speed.up_bytes_per_second,
            "latency_seconds": speed.latency_seconds,
        }
        lost = [r.lost_rounds for r in job.simulation.relays if r.relay == relay.name]
        relays.append(
            RelayLine(
                name=SiteId(relay.name),
                sites=[SiteId(s.name) for s in job.sites if s.name in relay.sites],
                combine=combine_of(SiteId(relay.name)),
                lost_rounds=lost[0] if lost else (),
                **(line if takes_time else {}),
            )
        )
    return RelayedGrid(grid, relays, clock=clock, in_order=not takes_time)
