"""What EC2 answers, in this product's errors: which one, and what to do about it.

A code without a row falls back on its beginning, then on its HTTP status. Failures on
the way to the service mean the same as with S3, whose tables say so.

Source: Amazon EC2 API reference, "Error codes for the Amazon EC2 API".
"""

from collections.abc import Mapping

from botocore.exceptions import ClientError

from cloud_adapters.compute.refusals import Refusal
from cloud_adapters.storage.s3 import errors as s3_errors
from federation.errors import (
    ComputeError,
    ComputeForbidden,
    ComputeUnauthenticated,
    ComputeUnavailable,
    MachineRefused,
    NoCapacity,
    NotAuthenticated,
    QuotaReached,
    StoreForbidden,
)

FAILURES = s3_errors.FAILURES
code_of = s3_errors.code_of

# The service's word for a token whose instance has ended.
TOKEN_IS_SPENT = "IdempotentInstanceTerminated"  # noqa: S105 -- no secret
# For one that has launched another machine than is asked for now.
TOKEN_IS_USED = "IdempotentParameterMismatch"  # noqa: S105 -- no secret
# For the newest console output of a machine type that is not built on Nitro.
NO_LATEST = "UnsupportedOperation"
# For a type that the zone does not have, and another may.
NOT_IN_ZONE = "Unsupported"

# What a pool asks for, besides passing a role to instances.
ACTIONS = (
    "ec2:CreateTags",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcEndpoints",
    "ec2:GetConsoleOutput",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
    "ssm:GetParameter",
)
_LISTED = ", ".join(ACTIONS)

_SERVER_ERRORS = 500

_ROWS: Mapping[Refusal, str] = {
    Refusal(
        NoCapacity, "the zone has no such machine now: name more zones, or try later"
    ): (
        "InsufficientInstanceCapacity InsufficientHostCapacity InsufficientCapacity "
        "InsufficientReservedInstanceCapacity ReservationCapacityExceeded "
        "UnfulfillableCapacity"
    ),
    Refusal(
        NoCapacity,
        "spot machines cost more than on demand now: try later, or set market to "
        "on-demand",
    ): "SpotMaxPriceTooLow",
    Refusal(
        MachineRefused,
        "the zone does not have machines of this type: name another zone or type",
    ): NOT_IN_ZONE,
    Refusal(
        NoCapacity, "the subnet has no free addresses: name another one"
    ): "InsufficientFreeAddressesInSubnet",
    Refusal(
        QuotaReached,
        "the account may not run more machines of this kind in this region: end some, "
        "or ask for a higher quota (Service Quotas, Amazon EC2, Running ... instances)",
    ): (
        "VcpuLimitExceeded InstanceLimitExceeded ResourceCountExceeded "
        "NetworkInterfaceLimitExceeded"
    ),
    Refusal(
        QuotaReached,
        "the account may not run more spot machines in this region: end some, or ask "
        "for a higher quota (Service Quotas, Amazon EC2, All ... Spot Instance "
        "Requests)",
    ): "MaxSpotInstanceCountExceeded MaxSpotFleetRequestCountExceeded",
    Refusal(
        QuotaReached,
        "the account may not have more disk space in this region: remove volumes, or "
        "ask for a higher quota (Service Quotas, Amazon EBS)",
    ): "VolumeLimitExceeded MaxIOPSLimitExceeded",
    Refusal(
        MachineRefused,
        "there is no such image in this region for this account: correct image",
    ): "ParameterNotFound ParameterVersionNotFound",
    Refusal(
        MachineRefused,
        "the service refuses the machine as it is described: correct what it names",
    ): (
        "InvalidParameter InvalidParameterValue InvalidParameterCombination "
        "MissingParameter InvalidBlockDeviceMapping VPCIdNotSpecified "
        "InstanceCreditSpecification.NotSupported"
    ),
    Refusal(
        ComputeForbidden,
        f"these credentials may not do this: their policy must allow {_LISTED}, and "
        "iam:PassRole for the role of the instance profile",
    ): "UnauthorizedOperation AccessDenied AccessDeniedException",
    Refusal(
        ComputeForbidden,
        "the account has no role for spot machines yet: create it once (aws iam "
        "create-service-linked-role --aws-service-name spot.amazonaws.com), or allow "
        "iam:CreateServiceLinkedRole",
    ): "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    Refusal(
        ComputeForbidden,
        "the organisation's policy of tags refuses them: correct tags",
    ): "TagPolicyViolation",
    Refusal(
        ComputeForbidden,
        "the account is not ready for EC2 in this region: sign in to the console and "
        "complete or verify it",
    ): "OptInRequired PendingVerification Blocked AccountDisabled",
    Refusal(
        ComputeUnauthenticated,
        "the service does not know or accept these credentials: check which are in use "
        "(aws sts get-caller-identity), the region, and this machine's clock",
    ): "AuthFailure",
    Refusal(
        ComputeUnavailable,
        "the service asks for fewer requests: try again later",
    ): (
        "RequestLimitExceeded RequestThrottled ThrottlingException Throttling "
        "EC2ThrottledException SlowDown TooManyRequestsException"
    ),
}
_CODES = {code: row for row, codes in _ROWS.items() for code in codes.split()}

_KINDS: Mapping[str, Refusal] = {
    "InvalidAMIID": Refusal(
        MachineRefused,
        "there is no such image in this region for this account: correct image",
    ),
    "InvalidInstanceType": Refusal(
        MachineRefused, "there is no such type of machine: correct type"
    ),
    "InvalidSubnetID": Refusal(
        MachineRefused, "there is no such subnet in this region: correct subnets"
    ),
    "InvalidGroup": Refusal(
        MachineRefused,
        "there is no such security group in this network: correct firewalls",
    ),
    "InvalidSecurityGroupID": Refusal(
        MachineRefused,
        "there is no such security group in this network: correct firewalls",
    ),
    "InvalidKMSKey": Refusal(
        MachineRefused,
        "the key of the disk cannot be used: correct disk_key, enable the key, and let "
        "these credentials use it (kms:CreateGrant, kms:DescribeKey, kms:Decrypt, "
        "kms:GenerateDataKeyWithoutPlaintext)",
    ),
    "InvalidZone": Refusal(
        MachineRefused, "there is no such zone in this region: correct zones"
    ),
    "InvalidIamInstanceProfile": Refusal(
        MachineRefused,
        "there is no such instance profile: correct identity; one that was made just "
        "now takes some seconds",
    ),
}
# Of proxies, and of services whose answer has no code.
_STATUSES: Mapping[int, Refusal] = {
    401: _CODES["AuthFailure"],
    403: _CODES["UnauthorizedOperation"],
}
_BUSY = Refusal(
    ComputeUnavailable,
    "the service has a fault of its own: try again later, and see its status page",
)
_REFUSED = Refusal(
    ComputeError, "the service refuses the request as it is: correct what it names"
)


def translate(error: Exception, doing: str) -> ComputeError:
    """Turn a failure of the library or the service into an error of ours.

    Args:
        error: What was raised, one of ``FAILURES``; keep it as the cause.
        doing: What was being done, and where: ``launch site-a in us-east-1a``.
    """
    if not isinstance(error, ClientError):
        return _on_the_way(error).told(doing, type(error).__name__)
    code = code_of(error)
    words = error.response.get("Error", {}).get("Message", "no message")
    return _of_answer(error, code).told(doing, f"{code}: {words}")


def _of_answer(error: ClientError, code: str) -> Refusal:
    if code == "InvalidParameterValue" and "iamInstanceProfile" in str(error):
        code = "InvalidIamInstanceProfile"
    row = _CODES.get(code) or _KINDS.get(code.partition(".")[0])
    shared = s3_errors.CODES.get(code)
    if row is None and shared is not None and shared.error is NotAuthenticated:
        row = Refusal(ComputeUnauthenticated, shared.advice)
    status = s3_errors.status_of(error)
    fallback = _BUSY if status >= _SERVER_ERRORS else _REFUSED
    return row or _STATUSES.get(status) or fallback


def _on_the_way(error: Exception) -> Refusal:
    shared = s3_errors.meaning_of(error)
    kinds: Mapping[type[Exception], type[ComputeError]] = {
        NotAuthenticated: ComputeUnauthenticated,
        StoreForbidden: ComputeForbidden,
    }
    return Refusal(kinds.get(shared.error, ComputeUnavailable), shared.advice)
