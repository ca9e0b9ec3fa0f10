"""Proofs of who a machine is, by the cloud that runs it: made there, checked here.

In a cluster of Kubernetes the proof is the binding itself, which names the pod's keys:
the command that expects the pod has read it in the pod's log.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cloud_adapters.extras import naming_extras
from cloud_adapters.identity import google_token, sts_proof
from cloud_adapters.identity.google_token import GoogleVerifier
from cloud_adapters.identity.sts_proof import StsVerifier
from federation.errors import ProofRefused
from federation.platform_identity import AWS, GCP, KUBERNETES, PlatformIdentity
from federation.protocols import Clock

_SHOWN = "the keys of this site are "
_LINE = re.compile(rf"(?:crossfed: )?{_SHOWN}([0-9a-f]{{64}})")


def prover(
    platform: str, region: str, show: Callable[[str], None]
) -> Callable[[str], str]:
    """What makes a proof of a binding on this machine.

    Args:
        platform: ``aws``, ``gcp`` or ``kubernetes``.
        region: On AWS, whose STS will be asked.
        show: In a cluster, writes a line to the log of this pod; once for each binding.
    """
    shown: set[str] = set()

    def prove(binding: str) -> str:
        if platform == KUBERNETES:
            if binding not in shown:
                show(f"{_SHOWN}{binding}")
            shown.add(binding)
            return binding
        with naming_extras():
            if platform == AWS:
                return sts_proof.prove(binding, region)
            return google_token.prove(binding)

    return prove


def shown_keys(log: str) -> str:
    """Which keys a pod has made, as its log says; empty if it does not yet.

    The first line counts: it is written before the pod sends any request, and no
    line after it can be taken for it, since what others say is never a whole line.
    """
    found = (_LINE.fullmatch(line.strip()) for line in log.split("\n"))
    return next((line[1] for line in found if line is not None), "")


@dataclass(kw_only=True)
class PlatformVerifier:
    """Checks proofs of clouds and clusters; threads may share it.

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
        if expected.platform == KUBERNETES:
            # Nobody is asked: the binding is of keys that have signed the request.
            shown = replace(expected, principal=binding)
        elif expected.platform == GCP:
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
