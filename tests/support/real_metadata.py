"""What a machine of each cloud asks, where the metadata service really is.

It proves who it is, and learns that it is taken back. Run in a network namespace of its
own that has 169.254.169.254; see ``tests/integration/test_machine_identity.py``. Prints
what the clouds confirm, and what the machine is told.
"""

import time
from collections.abc import Callable

from support import fake_platforms
from support.fake_imds import FakeImds
from support.fake_platforms import CheckingSts, GoogleMachine
from support.google_server import Answer, Request

from cloud_adapters.compute import notices
from cloud_adapters.compute.notices import Ec2Notices, Look
from cloud_adapters.identity import google_token, sts_proof
from cloud_adapters.identity.google_token import GoogleVerifier
from cloud_adapters.identity.sts_proof import StsVerifier
from deploy.site_host.departure import Departure, watch
from federation.clock import SystemClock

PLACE = ("169.254.169.254", 80)
BINDING, REGION = "ab" * 32, "eu-west-3"
CLOCK = SystemClock()


class RealImds(FakeImds):
    """At the real address."""

    place = PLACE

    def take_back(self) -> None:
        """Interrupt the machine, as EC2 does two minutes before."""
        end = time.gmtime(time.time() + 120)
        text = time.strftime("%Y-%m-%dT%H:%M:%SZ", end)
        self.action = {"action": "terminate", "time": text}


class RealGoogle(GoogleMachine):
    """At the real address."""

    place = PLACE
    is_preempted = False

    def take_back(self) -> None:
        """Preempt the machine, as Compute Engine does thirty seconds before."""
        self.is_preempted = True

    def _serve(self, request: Request) -> Answer:
        if request.path != "/computeMetadata/v1/instance/preempted":
            return super()._serve(request)
        if request.headers.get("metadata-flavor") != "Google":
            return Answer(403)
        return Answer(200, {}, b"TRUE" if self.is_preempted else b"FALSE")


def leave(look: Look, take_back: Callable[[], None]) -> None:
    """Watch for a notice, get it, and print it and why the site leaves."""
    departure, told = Departure(), list[str]()
    watch(look, departure, CLOCK, told.append)
    assert not departure.last.is_set()
    take_back()
    assert departure.last.wait(30)
    print(departure.after_this(), *told)  # noqa: T201
    departure.stopped.set()


def main() -> None:
    """Print two lines of each cloud."""
    with RealImds() as imds, CheckingSts() as sts:
        sts.arn = fake_platforms.arn_of()
        sts.secret, sts.session = "secret-of-the-instance", "session-of-the-instance"
        proof = sts_proof.prove(BINDING, REGION)
        aws = StsVerifier(clock=CLOCK, endpoint=f"{sts.url}/")
        print(aws.verify(proof, BINDING, REGION))  # noqa: T201
        leave(Ec2Notices(CLOCK, print), imds.take_back)
    with RealGoogle() as google:
        proof = google_token.prove(BINDING)
        gcp = GoogleVerifier(clock=CLOCK, certificates=f"{google.url}/certs")
        print(gcp.verify(proof, BINDING))  # noqa: T201
        leave(notices.gce(), google.take_back)


if __name__ == "__main__":
    main()
