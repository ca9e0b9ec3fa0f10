"""The operator of a deployment's sites: what is checked before a roster is signed."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support import fake_platforms
from support.enrolments import NOW, Federation
from support.fake_platforms import EMAIL, MACHINE, PROJECT, ZONE, GoogleMachine
from support.small_jobs import small_job

from cloud_adapters.identity import google_token
from deploy.aggregator_host import enrolment_machines, enrolment_operator
from deploy.fleet import preflight, roster_operator, spec
from deploy.fleet.roster_operator import Operator
from deploy.site_host import enrol
from deploy.site_host.enrol import MachineProof
from federation.clock import VirtualClock
from federation.errors import CorruptObject, FederationError, JobError, ProofRefused
from federation.platform_identity import GCP, of_service_account
from monitoring.runs.run_folder import RunFolder
from privacy.membership import roster_signature
from privacy.membership.certificates import Authority
from privacy.membership.messages import Prove
from privacy.membership.token import EnrolmentRefused
from privacy.secagg.agreement import identity, roster
from privacy.secagg.errors import RosterRefused, StaleRoster

EXPECTED = of_service_account(EMAIL, project=PROJECT, instance=f"{ZONE}/{MACHINE}")
STRANGER = identity.generate(lambda n: bytes(range(1, n + 1)))


@dataclass
class Deployed:
    """An aggregator with a site of this host and one of a cloud, and their operator."""

    federation: Federation
    google: GoogleMachine

    def operator(self) -> Operator:
        return roster_operator.open_operator(
            self.federation.folder,
            self.federation.aggregator,
            random_bytes=os.urandom,
            verifier=self.federation.verifier,
        )

    def enrol(self, prove: Prove | None = None, folder: str = "site-b") -> None:
        made = self.federation
        token = enrolment_operator.invite_machine(
            made.config, "site-b", EXPECTED, clock=made.clock
        )
        enrol.enroll(
            token,
            made.folder / folder,
            organisation="Test",
            clock=made.clock,
            connect=lambda *_: made.way,
            vouched=MachineProof(platform=GCP, prove=prove or self.prove),
        )

    def prove(self, binding: str) -> str:
        audience = google_token.AUDIENCE + binding
        return fake_platforms.token(audience, now=self.federation.clock.now())

    def local(self) -> bytes:
        path = self.federation.folder / "site-a" / "identity.pem"
        return identity.load(path).public.key

    def keys(self, found: Operator) -> dict[str, bytes]:
        checked = found.checked("site-b", EXPECTED)
        assert checked is not None
        return {"site-a": self.local(), "site-b": checked}

    @property
    def path(self) -> Path:
        return self.federation.aggregator / "roster.toml"

    def rewrite(self, change: Callable[[roster.Roster], roster.Roster]) -> None:
        """Do to the roster what whoever has the aggregator's host could."""
        roster.save(change(roster.load(self.path)), self.path)


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    with GoogleMachine() as server:
        url = f"{server.url}/certs"
        made = Federation(folder=tmp_path, google_certificates=url)
        made.site("site-a")
        yield Deployed(made, server)


def test_roster_of_checked_sites_is_signed(deployed: Deployed):
    """For this federation; the aggregator passes the signature on."""
    found = deployed.operator()
    assert found.checked("site-b", EXPECTED) is None
    deployed.enrol()
    signed = found.sign(deployed.keys(found))
    signature = enrolment_machines.signature_of(deployed.federation.aggregator, signed)
    folder, clock = deployed.federation.aggregator, deployed.federation.clock
    roster_signature.check(
        signed,
        signature,
        authority=Authority.load(folder, clock=clock).fingerprint,
        signer=found.key.public.key.hex(),
    )
    path = deployed.federation.folder / "operator.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    # Once more, as the next command does: the same.
    again = deployed.operator()
    assert again.key.public == found.key.public
    assert again.sign(deployed.keys(again)) == signed


def with_key(site: str, key: bytes) -> Callable[[roster.Roster], roster.Roster]:
    def change(found: roster.Roster) -> roster.Roster:
        entries = [
            replace(e, public_key=key) if e.site == site else e for e in found.sites
        ]
        return replace(found, sites=tuple(entries), serial=found.serial + 1)

    return change


def without(site: str) -> Callable[[roster.Roster], roster.Roster]:
    def change(found: roster.Roster) -> roster.Roster:
        kept = tuple(entry for entry in found.sites if entry.site != site)
        return replace(found, sites=kept, serial=found.serial + 1)

    return change


def with_another(found: roster.Roster) -> roster.Roster:
    more = roster.RosterEntry(
        site="site-z", organisation="Z", public_key=STRANGER.public.key
    )
    return replace(found, sites=(*found.sites, more), serial=found.serial + 1)


def with_another_aggregator(found: roster.Roster) -> roster.Roster:
    return replace(found, aggregator_key=STRANGER.public.key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_key("site-a", STRANGER.public.key), "for site 'site-a' it names another"),
        (with_key("site-b", STRANGER.public.key), "for site 'site-b' it names another"),
        (without("site-a"), "does not name site 'site-a'"),
        (without("site-b"), "does not name site 'site-b'"),
        (with_another, "names site 'site-z', which this deployment"),
        (with_another_aggregator, "another key of the"),
    ],
)
def test_aggregator_that_names_others_gets_no_signature(
    deployed: Deployed,
    change: Callable[[roster.Roster], roster.Roster],
    words: str,
):
    """Whatever it has written: keys come from where they were made."""
    deployed.enrol()
    deployed.rewrite(change)
    found = deployed.operator()
    with pytest.raises(RosterRefused, match=words):
        found.sign(deployed.keys(found))
    folder = deployed.federation.aggregator
    assert enrolment_machines.signature_of(folder, roster.load(deployed.path)) == ""


def test_sites_of_other_operators_need_the_digest(deployed: Deployed):
    """Which a person has compared; it vouches for nobody's key of this deployment."""
    deployed.enrol()
    deployed.rewrite(with_another)
    found = deployed.operator()
    keys, digest = deployed.keys(found), roster.load(deployed.path).digest.hex()
    for short in ("", digest[:31], "0" * 32):
        with pytest.raises(RosterRefused, match=f"--accept {digest}"):
            found.sign(keys, accept=short)
    deployed.rewrite(with_key("site-b", identity.generate(os.urandom).public.key))
    whole = roster.load(deployed.path).digest.hex()
    with pytest.raises(RosterRefused, match="for site 'site-b' it names another"):
        found.sign(keys, accept=whole)
    deployed.rewrite(with_key("site-b", keys["site-b"]))
    whole = roster.load(deployed.path).digest.hex()
    assert len(found.sign(keys, accept=f" {whole[:32].upper()} ").sites) == 3
    assert len(deployed.operator().sign(keys).sites) == 3  # It has been accepted.


def test_no_second_roster_of_a_serial_is_signed(deployed: Deployed):
    """Nor an older one: a site could be given either."""
    deployed.enrol()
    found = deployed.operator()
    keys = deployed.keys(found)
    signed = found.sign(keys)
    entries = [replace(entry, organisation="Other") for entry in signed.sites]
    for other in (
        replace(signed, sites=tuple(entries)),
        replace(signed, serial=signed.serial - 1),
    ):
        roster.save(other, deployed.path)
        with pytest.raises(StaleRoster, match="was signed before"):
            deployed.operator().sign(keys)
    roster.save(signed, deployed.path)
    assert deployed.operator().sign(keys) == signed


@pytest.mark.parametrize(
    ("spoiled", "error", "words"),
    [
        ({"identity": STRANGER.public.key.hex()}, EnrolmentRefused, "signature of"),
        ({"site": "site-c"}, EnrolmentRefused, "not from its machine"),
        ({"platform": "aws"}, EnrolmentRefused, "not from its machine"),
        ({"proof": "e30.e30.e30"}, ProofRefused, "RS256"),
        ({"node_key": "x"}, EnrolmentRefused, "not a public key"),
        ({"kind": "renewal"}, EnrolmentRefused, "malformed"),
    ],
)
def test_what_the_aggregator_keeps_is_not_believed(
    deployed: Deployed,
    spoiled: dict[str, Any],
    error: type[FederationError],
    words: str,
):
    """Signatures, binding and cloud are checked once more."""
    deployed.enrol()
    folder = deployed.federation.aggregator
    body = enrolment_machines.kept(folder, "site-b")
    assert body is not None
    changed = json.dumps({**json.loads(body), **spoiled}).encode()
    enrolment_machines.keep(folder, "site-b", changed)
    with pytest.raises(error, match=words):
        deployed.operator().checked("site-b", EXPECTED)


def test_machine_other_than_the_launched_one_is_refused(deployed: Deployed):
    """Though the aggregator would have admitted it."""
    deployed.enrol()
    another = replace(EXPECTED, instance=f"{ZONE}/other")
    with pytest.raises(ProofRefused, match=f"instance '{ZONE}/{MACHINE}'"):
        deployed.operator().checked("site-b", another)


def test_checked_machine_needs_no_second_proof(deployed: Deployed):
    """A proof is old after ten minutes; what was checked stays checked, for its key."""
    deployed.enrol()
    key = deployed.operator().checked("site-b", EXPECTED)
    deployed.federation.clock.sleep(3600.0)
    assert deployed.operator().checked("site-b", EXPECTED) == key
    record = deployed.federation.folder / "operator.json"
    text = record.read_text().replace(key.hex(), STRANGER.public.key.hex())
    record.write_text(text)
    with pytest.raises(ProofRefused, match="s old"):
        deployed.operator().checked("site-b", EXPECTED)


def test_another_authority_is_refused(deployed: Deployed):
    """Machines were given the fingerprint of the first one."""
    deployed.operator()
    other = Authority.create("other", clock=VirtualClock(NOW))
    (deployed.federation.aggregator / "ca.crt").write_bytes(other.pem)
    with pytest.raises(CorruptObject, match="certificate that machines"):
        deployed.operator()


FILE = """
name = "fed"
job = "job.toml"
[aggregator]
address = "203.0.113.10:8443"
[release]
wheel = "https://example.org/crossfed-0.1.0-py3-none-any.whl"
sha256 = "{digest}"
[[sites]]
name = "aws-us-east-1"
provider = "aws"
[sites.machine]
region = "us-east-1"
type = "m5.large"
identity = "profile"
role = "arn:aws:iam::123456789012:role/crossfed-site"
[[sites]]
name = "gcp-us-central1"
provider = "gcp"
[sites.machine]
region = "us-central1"
project = "p-1"
zones = ["us-central1-a"]
type = "e2-standard-4"
identity = "site@p-1.iam.gserviceaccount.com"
""".format(digest="ab" * 32)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("", "", ""),
        ("wheel =", "image =", "release"),
        ('"ab', '"xb', "release"),
        ("203.0.113.10", "127.0.0.1", "aggregator.address"),
        ("203.0.113.10", "127.9.9.9", "aggregator.address"),
        ("203.0.113.10", "[::1]", "aggregator.address"),
        ("203.0.113.10", "0.0.0.0", "aggregator.address"),  # noqa: S104
        ("203.0.113.10", "169.254.1.1", "aggregator.address"),
        ("203.0.113.10", "localhost", "aggregator.address"),
        ("203.0.113.10", "a.localhost", "aggregator.address"),
        ('address = "203.0.113.10:8443"', "", "aggregator.address"),
        ('identity = "profile"', "", "sites[0].machine.identity"),
        ('role = "arn:aws:iam::123456789012:role/crossfed-site"', "", "machine.role"),
        ("role/crossfed-site", "user/anna", "sites[0].machine.role"),
        ('"us-east-1"\ntype', '"us-east-1.evil.example"\ntype', "machine.role"),
        ('"site@p-1', '"anna@p-1', ""),
        ("site@p-1.iam.gserviceaccount.com", "anna@example.org", "machine.identity"),
        ('identity = "site@p-1.iam.gserviceaccount.com"', "", "[1].machine.identity"),
    ],
)
def test_what_a_machine_lacks_is_named(tmp_path: Path, old: str, new: str, key: str):
    """With its key, before anything is started."""
    jobs = Path(__file__).parents[3] / "jobs"
    head, _, tail = (
        (jobs / "quickstart.toml").read_text().partition("[privacy.secure_aggregation]")
    )
    (tmp_path / "job.toml").write_text(head + tail[tail.index("[[sites]]") :])
    path = tmp_path / "fed.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    plan = spec.load(path)
    job = spec.load_job(plan)
    if not key:
        preflight.check_before(plan, job)
        return
    with pytest.raises(JobError) as caught:
        preflight.check_before(plan, job)
    assert key in str(caught.value)


def test_more_work_than_a_site_allows_is_refused_before_its_machine_starts(
    tmp_path: Path,
):
    """By the policy in the deployment file, and by the default."""
    training = {"local_steps": 1, "accumulate_from": [[2, 2**62]]}
    job = small_job(num_sites=2, rounds=2, training=training)
    RunFolder(tmp_path).write_job(job)
    site = {"name": "site-1", "provider": "local"}
    path = tmp_path / "fed.toml"
    for limit, is_allowed in (({}, False), ({"max_accumulate": 2**62}, True)):
        table = {"name": "fed", "job": "job.toml", "sites": [site | {"policy": limit}]}
        path.write_text(tomli_w.dumps(table))
        plan = spec.load(path)
        if is_allowed:
            preflight.check_before(plan, spec.load_job(plan))
            continue
        with pytest.raises(JobError, match=r"policy\.max_accumulate"):
            preflight.check_before(plan, spec.load_job(plan))


def test_relays_are_not_started(tmp_path: Path):
    """Or machines would be paid for, and the job would then lack a party."""
    job = small_job(
        num_sites=2,
        relays=[{"name": "cloud", "sites": ["site-0"]}],
        schedule={"minimum_sites": 1},
    )
    RunFolder(tmp_path).write_job(job)
    site = {"name": "site-0", "provider": "local"}
    path = tmp_path / "fed.toml"
    path.write_text(tomli_w.dumps({"name": "fed", "job": "job.toml", "sites": [site]}))
    plan = spec.load(path)
    with pytest.raises(JobError, match="starts no relays") as caught:
        preflight.check_before(plan, spec.load_job(plan))
    assert caught.value.key == "relays"
