"""IAM on a bucket, as far as our conditions go: roles bound under conditions.

Source: https://cloud.google.com/iam/docs/conditions-attribute-reference.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

# Of Cloud KMS, as its documentation lists them:
# https://cloud.google.com/kms/docs/reference/permissions-and-roles.
PERMISSIONS_OF_ROLES = {
    "roles/cloudkms.cryptoKeyEncrypterDecrypter": {
        "cloudkms.cryptoKeyVersions.useToDecrypt",
        "cloudkms.cryptoKeyVersions.useToEncrypt",
        "cloudkms.locations.get",
        "cloudkms.locations.list",
        "resourcemanager.projects.get",
    }
}

_STRING = r'("(?:[^"\\]|\\.)*")'
_EXPRESSION = re.compile(
    rf"resource\.name\.startsWith\({_STRING}\) \|\| "
    r'api\.getAttribute\("storage\.googleapis\.com/objectListPrefix", ""\)'
    rf"\.startsWith\({_STRING}\)"
)


@dataclass(frozen=True, slots=True)
class Binding:
    """A role on a bucket, under a condition; both as ``gcloud`` takes them."""

    bucket: str
    role: str
    condition: str

    def allows(self, permission: str, bucket: str, name: str) -> bool:
        """Decide on a request; ``name`` is of the object, or the listed prefix."""
        permissions = json.loads(self.role)["includedPermissions"]
        if bucket != self.bucket or permission not in permissions:
            return False
        found = _EXPRESSION.fullmatch(json.loads(self.condition)["expression"])
        assert found is not None, "this is no expression of ours"
        name_begin, listed_begin = json.loads(found[1]), json.loads(found[2])
        resource = f"projects/_/buckets/{bucket}"
        if permission == "storage.objects.list":
            return resource.startswith(name_begin) or name.startswith(listed_begin)
        # The attribute of other requests is "", which begins with no prefix.
        return f"{resource}/objects/{name}".startswith(name_begin)


def allows(
    bindings: Iterable[Binding], permission: str, bucket: str, name: str
) -> bool:
    """Whether one of several bindings allows a request."""
    return any(binding.allows(permission, bucket, name) for binding in bindings)
