"""Sites of clouds, brought up without the aggregator that they would enrol with."""

from collections.abc import Callable, Mapping

from deploy.aggregator_host.config import AggregatorConfig
from deploy.fleet import cloud_sites, preflight, provision
from deploy.fleet.loop import NodeRequest
from deploy.fleet.roster_operator import Operator
from deploy.fleet.state import Deployment
from deploy.fleet.wanted import Known, wanted
from privacy.secagg.agreement.roster import Roster

ADDRESS = "192.0.2.1:8443"


def requests_of(
    deployment: Deployment, config: AggregatorConfig
) -> tuple[Operator, Mapping[str, NodeRequest]]:
    """The operator of a deployment's sites, and the nodes that it needs."""
    operator = cloud_sites.operator_of(deployment, config)
    known = Known(address=ADDRESS, gpus=preflight.check_gpus(deployment))
    return operator, wanted(deployment.plan, provision.trusting(known, operator))


def bring_up(
    deployment: Deployment, config: AggregatorConfig, tell: Callable[[str], None]
) -> Roster:
    """Have the sites of clouds work, as ``crossfed up`` does."""
    operator, requests = requests_of(deployment, config)
    return cloud_sites.bring_up(
        deployment,
        config,
        operator,
        requests,
        address=ADDRESS,
        accept="",
        tell=tell,
    )
