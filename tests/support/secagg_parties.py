"""Whole parties of secure aggregation, with deterministic entropy."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from federation.ids import RunId, SiteId
from privacy.keystream import RandomBytes
from privacy.secagg.agreement import identity as identities
from privacy.secagg.agreement.contract import Contract, members_of, smallest_threshold
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.policy import LocalPolicy
from privacy.secagg.agreement.roster import Roster, RosterEntry
from privacy.secagg.agreement.terms import PrivacyTerms
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.key_schedule import RoundFacts, RunSecrets
from privacy.secagg.protocol.messages import Confirms
from privacy.secagg.protocol.round_memory import InMemoryRounds
from privacy.secagg.protocol.server import AggregatorRound
from privacy.secagg.protocol.setup import AggregatorSetup, SetupRecord, SiteSetup

RUN = RunId("run-1")
CODE = hashlib.sha256(b"code").digest()
LAYOUT = hashlib.sha256(b"layout").digest()
JOB = hashlib.sha256(b"job").digest()
TASK = hashlib.sha256(b"task").digest()
MODEL = hashlib.sha256(b"model").digest()
DIGEST = hashlib.sha256(b"masked vector").digest()
HEADER = hashlib.sha256(b"masked header").digest()
RECORD = PrivacyTerms(
    profile="record",
    mechanism="dp-sgd",
    noise_multiplier=1.1,
    sampling_rate=0.01,
    steps_per_round=20,
    delta=1e-6,
    epsilon_cap=4.0,
    clip_norm=1.0,
)


def entropy(seed: str) -> RandomBytes:
    """A stream of bytes that depends on a seed alone; threads may share it."""
    positions = itertools.count()  # One step in C: no two threads get the same.

    def random_bytes(count: int) -> bytes:
        data = f"{seed}/{next(positions)}".encode()
        return hashlib.shake_256(data).digest(count)

    return random_bytes


def site_name(number: int) -> SiteId:
    """Names whose order is that of the numbers."""
    return SiteId(f"site-{number:02d}")


def arithmetic(values: dict[str, Any]) -> dict[str, Any]:
    """Scale and amplitude as they follow from a contract's other fields."""
    terms = values.get("differential_privacy", PrivacyTerms())
    try:
        ring = RingSpec(
            bits=values["ring_bits"],
            num_sites=len(values["members"]),
            clip_norm=values["clip_norm"],
            element_bound=values.get("element_bound"),
            noise_std=terms.ring_noise_std,
        )
    except ValueError:  # The contract is to say what is wrong.
        return {"scale": 1.0, "amplitude": 1}
    return {"scale": ring.scale, "amplitude": ring.amplitude}


@dataclass
class Parties:
    """A roster with all of its private keys."""

    num_sites: int
    aggregator: Identity = field(init=False)
    sites: dict[int, Identity] = field(init=False)
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self.aggregator = identities.generate(entropy("aggregator"))
        self.sites = {
            i: identities.generate(entropy(f"identity {i}"))
            for i in range(1, self.num_sites + 1)
        }
        self.roster = Roster(
            serial=3,
            aggregator_organisation="office",
            aggregator_key=self.aggregator.public.key,
            sites=tuple(
                RosterEntry(
                    site=site_name(i),
                    organisation=f"hospital {i}",
                    public_key=key.public.key,
                )
                for i, key in self.sites.items()
            ),
        )

    def contract(self, **changes: Any) -> Contract:
        """A contract of all sites."""
        count = self.num_sites
        values: dict[str, Any] = {
            "run_id": RUN,
            "code_hash": CODE,
            "layout_digest": LAYOUT,
            "job_digest": JOB,
            "num_values": 1000,
            "roster_serial": self.roster.serial,
            "roster_digest": self.roster.digest,
            "members": members_of(self.roster),
            "aggregator_key": self.roster.aggregator_key,
            "threshold": smallest_threshold(count),
            "min_sites": min(count, 3),
            "ring_bits": 32,
            "clip_norm": 1.0,
            "weight_rule": "examples",
            "max_examples": 10_000,
            "max_rounds": 50,
            "header_slots": ("weight", "loss"),
            "two_site_waiver": count == 2,
        }
        values |= changes
        return Contract(**(arithmetic(values) | values))

    def policy(self, **changes: Any) -> LocalPolicy:
        """A policy that the contract passes."""
        values: dict[str, Any] = {
            "roster": self.roster,
            "run_id": RUN,
            "job_digest": JOB,
            "code_hashes": frozenset({CODE}),
            "layout_digest": LAYOUT,
            "num_values": 1000,
            "min_sites": min(self.num_sites, 3),
            "max_clip_norm": 1.0,
            "max_rounds": 50,
            "header_slots": ("weight", "loss"),
            "accept_two_sites": True,
        }
        return LocalPolicy(**(values | changes))

    def site_setup(self, number: int, **changes: Any) -> SiteSetup:
        """One site's half of the setup."""
        values: dict[str, Any] = {
            "identity": self.sites[number],
            "site": site_name(number),
            "policy": self.policy(),
            "random_bytes": entropy(f"run keys {number}"),
        }
        return SiteSetup(**(values | changes))


@dataclass
class Run:
    """A run after its setup."""

    parties: Parties
    record: SetupRecord
    sessions: dict[int, SiteSession]
    secrets: dict[int, RunSecrets]
    log: dict[int, list[tuple[str, bytes]]]
    setups: dict[int, SiteSetup]

    @property
    def contract(self) -> Contract:
        return self.record.contract

    def facts(self, round_index: int = 1, **changes: Any) -> RoundFacts:
        values: dict[str, Any] = {
            "round_index": round_index,
            "cohort": self.contract.cohort,
            "model_digest": MODEL,
            "task_digest": TASK,
        }
        return RoundFacts(**(values | changes))

    def aggregator_round(self, round_index: int = 1) -> AggregatorRound:
        return AggregatorRound(setup=self.record, facts=self.facts(round_index))

    def masked(self, number: int, round_index: int = 1) -> bytes:
        """Begin a round at a site and give its masked message."""
        session = self.sessions[number]
        session.begin_round(self.facts(round_index))
        return session.finish_masked(vector_digest=DIGEST, header_digest=HEADER)

    def collect(
        self, numbers: Iterable[int] | None = None, round_index: int = 1
    ) -> AggregatorRound:
        """An aggregator's round with the answers of some sites, not yet closed."""
        server = self.aggregator_round(round_index)
        for number in self.contract.cohort if numbers is None else numbers:
            data = self.masked(number, round_index)
            server.on_masked(data, vector_digest=DIGEST, header_digest=HEADER)
        return server


def start(num_sites: int, **changes: Any) -> Run:
    """Set a run up, with every site honest."""
    parties = Parties(num_sites)
    contract = parties.contract(**changes)
    aggregator = AggregatorSetup(identity=parties.aggregator, contract=contract)
    log: dict[int, list[tuple[str, bytes]]] = {i: [] for i in parties.sites}
    setups = {
        i: parties.site_setup(
            i,
            policy=parties.policy(
                require_hybrid=contract.hybrid,
                run_id=contract.run_id,
                job_digest=contract.job_digest,
            ),
            audit=lambda purpose, mark, i=i: log[i].append((purpose, mark)),
        )
        for i in parties.sites
    }
    for setup in setups.values():
        aggregator.on_advert(setup.on_offer(aggregator.offer()))
    for setup in setups.values():
        aggregator.on_confirm(setup.on_book(aggregator.book()))
    record = aggregator.result()
    secrets = {i: setup.on_confirms(record.confirms) for i, setup in setups.items()}
    sessions = {
        i: SiteSession(
            contract=setups[i].contract,
            identity=parties.sites[i],
            secrets=secrets[i],
            memory=InMemoryRounds(),
            random_bytes=entropy(f"rounds {i}"),
            audit=lambda purpose, mark, i=i: log[i].append((purpose, mark)),
        )
        for i in secrets
    }
    return Run(parties, record, sessions, secrets, log, setups)


def alter(message: Any, **changes: Any) -> Any:
    """A copy of a message with other fields."""
    return dataclasses.replace(message, **changes)


def confirms_with(record: SetupRecord, number: int, confirm: bytes) -> bytes:
    """The confirms of a setup, with one of them exchanged."""
    confirms = Confirms.from_bytes(record.confirms).confirms
    return Confirms(confirms={**confirms, number: confirm}).to_bytes()
