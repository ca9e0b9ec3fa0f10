"""Errors of secure aggregation, in one tree.

FederationError
|-- KeyFileRefused            an identity file that others could read or have made
|-- RosterRefused             a roster file that says something impossible
`-- ProtocolError
    |-- MalformedMessage      bytes that are not the one spelling of a message
    |-- BadSignature          a signature that the pinned key did not make
    |-- UnknownSite           a site or number that is not in the contract
    |-- StaleRoster           a roster that has been replaced
    |-- ContractRefused       a contract below what this site accepts
    |-- BookRefused           adverts or confirms that are not those of one setup
    |-- WeakKey               a public key whose shared secret would be known
    |-- ReplayedRound         a round number that is not above the last one
    |-- WrongContext          a message about another run, setup, round or model
    |-- WrongCohort           a round that asks other sites than the contract's
    |-- CohortRefused         a sum that with others would single out too few sites
    |-- DrawRefused           groups that were not drawn by all sites together
    |-- TooFewSites           fewer sites than the threshold, or a site missing
    |-- InconsistentSurvivors lists of survivors that cannot both be true
    |-- BadShare              a share that is damaged, missing or inconsistent
    |-- NotSetUp              a round at a site that has no keys for it
    |-- NoState               a round that begins with a state that a site lacks
    |-- CertificateRefused    a model that is not what its certificate says
    `-- OutOfOrder            a step that is not next

Errors of the arithmetic, ``SumOutOfRange`` among them, are in ``ring_errors``.

Catching one of these means that nothing secret has left: every check runs
before the step's answer is made. Messages name what failed and at whom and never
carry a key, a share, a mask or a weight.
"""

from federation.errors import FederationError, ProtocolError


class KeyFileRefused(FederationError):
    """An identity file is missing, unreadable, damaged or open to others."""


class RosterRefused(FederationError):
    """A roster file is malformed or contradicts itself."""


class MalformedMessage(ProtocolError):
    """Bytes are not the canonical encoding of the message that was expected."""


class BadSignature(ProtocolError):
    """A signature was not made by the key that is pinned for its sender."""


class UnknownSite(ProtocolError):
    """A site or client number does not belong to the run."""


class StaleRoster(ProtocolError):
    """A contract is based on a roster that this site knows to be replaced."""


class ContractRefused(ProtocolError):
    """A contract is contradictory, or asks for less than the site's policy.

    Args:
        message: What is wrong.
        key: The contract's field, for example ``min_sites``.
    """

    def __init__(self, message: str, *, key: str) -> None:
        """Keep the key apart, so that callers can point at it."""
        super().__init__(f"contract.{key}: {message}")
        self.key = key


class BookRefused(ProtocolError):
    """The adverts or confirms that the aggregator shows are not one setup's."""


class WeakKey(ProtocolError):
    """A public key is of small order or not a key at all."""


class ReplayedRound(ProtocolError):
    """A round number is not above every number that was ever answered."""


class WrongContext(ProtocolError):
    """A message belongs to another run, setup, round, model or cohort."""


class WrongCohort(ProtocolError):
    """A round's cohort is not the one that the contract pins."""


class CohortRefused(ProtocolError):
    """A sum would single out too few sites, alone or together with earlier ones."""


class DrawRefused(ProtocolError):
    """Groups of sites do not follow from the draw that this site took part in."""


class TooFewSites(ProtocolError):
    """Fewer sites took part than the contract requires."""


class InconsistentSurvivors(ProtocolError):
    """A list of survivors is malformed, or contradicts another one."""


class BadShare(ProtocolError):
    """A share is damaged, missing, repeated or of the wrong length."""


class NotSetUp(ProtocolError):
    """A site has no keys of a round's setup: it needs a new setup."""


class NoState(ProtocolError):
    """A site does not have the state that all sites are to begin a round with."""


class CertificateRefused(ProtocolError):
    """A model arrived with a certificate that does not fit it or earlier ones."""


class OutOfOrder(ProtocolError):
    """A protocol step was called when another one was due."""
