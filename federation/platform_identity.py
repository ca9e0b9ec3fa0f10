"""Who a machine is to its cloud: what operators expect, and what clouds confirm.

A pod of a Kubernetes cluster has no cloud to ask. It says in its log which keys it has
made, and its operator, who launched it, reads that through the cluster's API server and
expects these keys.
"""

import re
from dataclasses import dataclass

AWS, GCP, KUBERNETES = "aws", "gcp", "kubernetes"
PLATFORMS = (AWS, GCP, KUBERNETES)

_ROLE = re.compile(
    r"arn:aws(-us-gov)?:iam::(?P<account>\d{12}):role/([\w+=,.@/-]{1,512}/)?"
    r"(?P<role>[\w+=,.@-]{1,64})",
    re.ASCII,
)
_REGION = re.compile(r"[a-z]{2}(-[a-z]{1,12}){1,3}-\d{1,2}")
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
_ACCOUNT = re.compile(r"[a-z0-9.-]{1,100}@[a-z0-9.-]{1,100}\.gserviceaccount\.com")
_PROJECT = re.compile(r"([a-z0-9.-]{1,60}:)?[a-z][a-z0-9-]{1,60}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_JOB = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_CLUSTER_CHARS = 300
_PLACE = re.compile(r"[a-z0-9-]{1,30}/[a-z0-9-]{1,63}")
# What account and principal are, in words.
_WORDS = {
    AWS: ("account", "role"),
    GCP: ("project", "service account"),
    KUBERNETES: ("namespace", "keys"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformIdentity:
    """A machine's identity at its cloud.

    Attributes:
        platform: ``aws``, ``gcp`` or ``kubernetes``.
        account: Number of the AWS account, id of the Google Cloud project, or cluster
            and namespace.
        principal: Name of the role, address of the service account, or in a cluster
            the digest of the keys that the pod has made.
        region: On AWS, the region whose STS confirms it; elsewhere empty.
        instance: Id of the instance on AWS, ``ZONE/NAME`` on Google Cloud, name of the
            job in a cluster; empty for any machine of the principal.
    """

    platform: str
    account: str
    principal: str
    region: str = ""
    instance: str = ""

    def difference(self, shown: "PlatformIdentity") -> str:
        """Say in which respect a machine is not the one that is expected here.

        Args:
            shown: What its cloud confirms.

        Returns:
            Empty if it is the one.
        """
        account, principal = _WORDS[self.platform]
        for word, expected, found in (
            ("cloud", self.platform, shown.platform),
            (account, self.account, shown.account),
            (principal, self.principal, shown.principal),
            ("region", self.region, shown.region),
            ("instance", self.instance or shown.instance, shown.instance),
        ):
            if expected != found:
                return f"{word} {found!r}"
        return ""

    def __str__(self) -> str:
        """For logs and lists."""
        parts = (self.platform, self.account, self.principal, self.instance)
        return " ".join(filter(None, parts))


def of_role(arn: str, *, region: str, instance: str = "") -> PlatformIdentity:
    """Expect a machine that has a role of AWS.

    Args:
        arn: ``arn:aws:iam::ACCOUNT:role/NAME``.
        region: Whose STS has to confirm it, for example ``us-east-1``.
        instance: Id of the instance; empty for any.

    Raises:
        ValueError: One of them is not of this form.
    """
    found = _ROLE.fullmatch(arn)
    if found is None:
        raise ValueError(f"{arn!r:.200} is not arn:aws:iam::ACCOUNT:role/NAME")
    if not _REGION.fullmatch(region):
        raise ValueError(f"{region!r:.80} is not a region of AWS")
    if instance and not _INSTANCE.fullmatch(instance):
        raise ValueError(f"{instance!r:.80} is not the id of an instance")
    return PlatformIdentity(
        platform=AWS,
        account=found["account"],
        principal=found["role"],
        region=region,
        instance=instance,
    )


def of_service_account(
    email: str, *, project: str, instance: str = ""
) -> PlatformIdentity:
    """Expect a machine that runs as a service account of Google Cloud.

    Args:
        email: Address of the service account.
        project: Id of the project that the machine is in.
        instance: ``ZONE/NAME``; empty for any.

    Raises:
        ValueError: One of them is not of this form.
    """
    if not _ACCOUNT.fullmatch(email):
        raise ValueError(f"{email!r:.200} is not the address of a service account")
    if not _PROJECT.fullmatch(project):
        raise ValueError(f"{project!r:.80} is not the id of a project")
    if instance and not _PLACE.fullmatch(instance):
        raise ValueError(f"{instance!r:.100} is not ZONE/NAME")
    return PlatformIdentity(
        platform=GCP, account=project, principal=email, instance=instance
    )


def of_pod(keys: str, *, cluster: str, job: str) -> PlatformIdentity:
    """Expect the pod of a job that has said which keys it has.

    Args:
        keys: Digest of them, as ``privacy.membership.messages.binding`` has it.
        cluster: Cluster and namespace, in the operator's words.
        job: Name of the job.

    Raises:
        ValueError: One of them is not of this form.
    """
    if not _DIGEST.fullmatch(keys):
        raise ValueError(f"{keys!r:.100} is no digest of keys")
    if not (0 < len(cluster) <= _CLUSTER_CHARS and cluster.isprintable()):
        raise ValueError(f"{cluster!r:.100} is no name of a cluster")
    if not _JOB.fullmatch(job):
        raise ValueError(f"{job!r:.100} is no name of a job")
    return PlatformIdentity(
        platform=KUBERNETES, account=cluster, principal=keys, instance=job
    )
