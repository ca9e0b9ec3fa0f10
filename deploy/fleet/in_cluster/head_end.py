"""The end of a head's pod, which the cluster takes away or someone deletes.

Kubernetes sends the pod SIGTERM and kills what still runs 30 seconds later. Meanwhile
the aggregator stops, so that what it knows is on the volume and closed. The next head
continues the run from there; sites keep running and connect to it.
"""

from cloud_adapters.compute.pool import ComputePool, all_gone, wait_for
from deploy.fleet.reconcile import AGGREGATOR, DEPLOYMENT, ROLE
from deploy.fleet.roles import Tell
from federation.errors import ComputeError
from federation.protocols import Clock

# As a shell reports a program that SIGTERM has ended. With 0, the job would be complete
# and its pod not be replaced.
TERMINATED = 143
# Of the 30 seconds of ``kube_manifest.GRACE_SECONDS``.
STOP_SECONDS = 25.0


class HeadTerminated(BaseException):
    """Raised by the handler of SIGTERM, wherever a head is at work."""


def stop_aggregator(pool: ComputePool, name: str, clock: Clock, tell: Tell) -> None:
    """Stop the aggregator of a head, but none of its sites.

    Args:
        pool: The pool of this pod's own processes.
        name: Name of the deployment.
        clock: Tells time.
        tell: Called with a word about every step.

    Raises:
        ComputeError: The aggregator's node cannot be read.
    """
    tell("head: its pod has to end (SIGTERM): the aggregator stops, sites keep running")
    begin, labels = clock.monotonic(), {DEPLOYMENT: name, ROLE: AGGREGATOR}
    pool.terminate({node.id for node in pool.nodes(labels)})
    try:
        wait_for(
            pool,
            labels,
            all_gone,
            what="the aggregator ended",
            seconds=STOP_SECONDS,
            clock=clock,
        )
    except ComputeError as error:
        tell(f"head: {error}; it is killed with the pod, which costs at most one round")
    else:
        tell(
            f"head: the aggregator has stopped after {clock.monotonic() - begin:.1f} s"
        )
    tell(
        "head: the next head resumes the run: the cluster starts one if it has taken "
        "this pod away; otherwise, run crossfed up again"
    )
