"""Proofs of who a machine is, by the cloud that runs it: made there, checked here."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cloud_adapters.extras import naming_extras
from cloud_adapters.identity import google_token, sts_proof
from cloud_adapters.identity.google_token import GoogleVerifier
from cloud_adapters.identity.sts_proof import StsVerifier
from federation.errors import ProofRefused
from federation.platform_identity import AWS, GCP, PlatformIdentity
from federation.protocols import Clock


def prover(platform: str, region: str) -> Callable[[str], str]:
    """What makes a proof of a binding on this machine.

    Args:
        platform: ``aws`` or ``gcp``.
        region: On AWS, whose STS will be asked.
    """

    def prove(binding: str) -> str:
        with naming_extras():
            if platform == AWS:
                return sts_proof.prove(binding, region)
            return google_token.prove(binding)

    return prove


@dataclass(kw_only=True)
class PlatformVerifier:
    """Checks proofs of both clouds; threads may share it.

    Attributes:
        clock: Tells time.
        sts_endpoint: See ``StsVerifier``.
        google_certificates: See ``GoogleVerifier``.
    """

    clock: Clock
    sts_endpoint: str = ""
    google_certificates: str = ""
    _google: GoogleVerifier = field(init=False)

    def __post_init__(self) -> None:
        """Keep what is read of Google's certificates."""
        url = self.google_certificates or google_token.CERTIFICATES
        self._google = GoogleVerifier(clock=self.clock, certificates=url)

    def verify(
        self, proof: str, binding: str, expected: PlatformIdentity
    ) -> PlatformIdentity:
        """Have a cloud confirm that a machine is the one that is expected.

        Args:
            proof: What the machine sent.
            binding: What the proof must have been made for.
            expected: Which machine may have made it.

        Returns:
            Which machine has.

        Raises:
            ProofRefused: The cloud does not confirm it, or it is another machine.
            PlatformUnavailable: The cloud cannot be asked.
        """
        if expected.platform == GCP:
            shown = self._google.verify(proof, binding)
        else:
            aws = StsVerifier(clock=self.clock, endpoint=self.sts_endpoint)
            shown = aws.verify(proof, binding, expected.region)
        different = expected.difference(shown)
        if different:
            raise ProofRefused(
                f"the cloud confirms another machine than the one invited: {different}"
            )
        return shown
