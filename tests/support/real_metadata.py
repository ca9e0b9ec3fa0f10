"""A machine of each cloud proves who it is, where the metadata service really is.

Run in a network namespace of its own that has 169.254.169.254; see
``tests/integration/test_machine_identity.py``. Prints what the clouds confirm.
"""

from support import fake_platforms
from support.fake_imds import FakeImds
from support.fake_platforms import CheckingSts, GoogleMachine

from cloud_adapters.identity import google_token, sts_proof
from cloud_adapters.identity.google_token import GoogleVerifier
from cloud_adapters.identity.sts_proof import StsVerifier
from federation.clock import SystemClock

PLACE = ("169.254.169.254", 80)
BINDING, REGION = "ab" * 32, "eu-west-3"


class RealImds(FakeImds):
    """At the real address."""

    place = PLACE


class RealGoogle(GoogleMachine):
    """At the real address."""

    place = PLACE


def main() -> None:
    """Print two lines."""
    clock = SystemClock()
    with RealImds(), CheckingSts() as sts:
        sts.arn = fake_platforms.arn_of()
        sts.secret, sts.session = "secret-of-the-instance", "session-of-the-instance"
        proof = sts_proof.prove(BINDING, REGION)
        aws = StsVerifier(clock=clock, endpoint=f"{sts.url}/")
        print(aws.verify(proof, BINDING, REGION))  # noqa: T201
    with RealGoogle() as google:
        proof = google_token.prove(BINDING)
        gcp = GoogleVerifier(clock=clock, certificates=f"{google.url}/certs")
        print(gcp.verify(proof, BINDING))  # noqa: T201


if __name__ == "__main__":
    main()
