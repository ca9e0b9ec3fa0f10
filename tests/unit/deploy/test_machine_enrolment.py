"""Machines that their clouds vouch for: who gets in, and what of a proof is refused."""

import base64
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from support import fake_platforms
from support.enrolments import NOW, Federation
from support.fake_platforms import (
    ACCOUNT,
    AWS_KEYS,
    EMAIL,
    INSTANCE,
    MACHINE,
    PROJECT,
    ROLE,
    ZONE,
    CheckingSts,
    GoogleMachine,
    arn_of,
)
from support.google_server import Answer, json_answer

from cloud_adapters.identity import google_token, sts_proof
from cloud_adapters.identity.platforms import PlatformVerifier
from deploy.aggregator_host import enrolment_machines, enrolment_operator
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.site_host import config as site_file, enrol, enrolment_machine
from deploy.site_host.enrol import SiteEnrolled
from federation.clock import SystemClock, VirtualClock
from federation.platform_identity import (
    AWS,
    GCP,
    PlatformIdentity,
    of_role,
    of_service_account,
)
from privacy.membership import messages, roster_signature
from privacy.membership.certificates import Authority, new_key
from privacy.membership.messages import Prove
from privacy.membership.token import TOKEN_SECONDS, EnrolmentRefused, Token
from privacy.secagg.agreement import identity, roster
from privacy.secagg.errors import RosterRefused

REGION = "eu-west-3"
ROLE_ARN = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"
OF_AWS = of_role(ROLE_ARN, region=REGION, instance=INSTANCE)
OF_GCP = of_service_account(EMAIL, project=PROJECT, instance=f"{ZONE}/{MACHINE}")
SIGNER = identity.generate(lambda n: bytes(range(n)))
SITE_TOML = f"""
name = "{{site}}"
certificate = "site.pem"
roster_signer = "{SIGNER.public.key.hex()}"
[aggregator]
address = "127.0.0.1:8443"
authority = "ca.crt"
"""


def of_google(
    clock: Any = None,
    **claims: Any,
) -> Prove:
    """What a machine of Google's proves, or somebody who would be one."""
    now = (clock or VirtualClock(NOW)).now

    def prove(binding: str) -> str:
        audience = google_token.AUDIENCE + binding
        return fake_platforms.token(audience, now=now(), **claims)

    return prove


def of_amazon(binding: str) -> str:
    """What a machine of Amazon's proves."""
    return sts_proof.prove(binding, REGION)


class Machines:
    """An aggregator whose machines prove who they are."""

    def __init__(self, folder: Path, clock: Any, sts: str, certificates: str) -> None:
        self.federation = Federation(
            folder=folder, clock=clock, sts=sts, google_certificates=certificates
        )

    @property
    def authority(self) -> str:
        folder = self.federation.aggregator
        return Authority.load(folder, clock=self.federation.clock).fingerprint

    def invite(self, site: str, machine: PlatformIdentity) -> Token:
        return enrolment_operator.invite_machine(
            self.federation.config, site, machine, clock=self.federation.clock
        )

    def enroll(
        self, token: Token, prove: Prove, *, platform: str, folder: str = ""
    ) -> SiteEnrolled | None:
        return enrolment_machine.enroll_machine(
            token,
            self.federation.folder / (folder or token.site),
            organisation="Test",
            platform=platform,
            prove=prove,
            clock=self.federation.clock,
            connect=lambda *_: self.federation.way,
            patience_seconds=30.0,
        )

    def refused(self, prove: Prove, words: str, **named: Any) -> None:
        """A machine is refused, and nothing has become of it."""
        book = BookFile(folder=self.federation.aggregator)
        before = book.read()
        token = Token(
            address="127.0.0.1:8443",
            authority=self.authority,
            site=named.pop("site", "site-b"),
            secret=b"",
        )
        with pytest.raises(EnrolmentRefused, match=words):
            self.enroll(token, prove, folder="x", **{"platform": GCP, **named})
        assert book.read() == before
        assert not self.federation.nodes.known

    def prepare(self, site: str) -> Path:
        """The folder that a machine starts with: its operator signs rosters."""
        folder = self.federation.folder / site
        folder.mkdir(mode=0o700)
        (folder / "site.toml").write_text(SITE_TOML.format(site=site))
        return folder

    def roster(self) -> roster.Roster:
        return roster.load(self.federation.aggregator / "roster.toml")

    def sign(self, signer: identity.Identity = SIGNER, **changed: Any) -> None:
        found = changed.pop("roster", self.roster())
        authority = changed.pop("authority", self.authority)
        signature = roster_signature.sign(found, authority=authority, signer=signer)
        folder = self.federation.aggregator
        enrolment_machines.keep_signature(folder, self.roster(), signature)


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckingSts]:
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in AWS_KEYS.items():
        monkeypatch.setenv(name, value)
    with CheckingSts() as server:
        yield server


@pytest.fixture
def amazon(tmp_path: Path, sts: CheckingSts) -> Machines:
    folder = tmp_path / "aws"
    folder.mkdir()
    made = Machines(folder, SystemClock(), f"{sts.url}/", "")
    made.invite("site-a", OF_AWS)
    return made


@pytest.fixture
def google(tmp_path: Path) -> Iterator[Machines]:
    with GoogleMachine() as server:
        url = f"{server.url}/certs"
        made = Machines(tmp_path, VirtualClock(NOW), "", url)
        made.invite("site-b", OF_GCP)
        yield made


def test_machine_of_google_enrols_by_its_token(google: Machines):
    """With the keys that it has made; the book says which machine it is."""
    token = google.invite("site-b", OF_GCP)
    assert Token.parse(token.text) == token
    assert google.enroll(token, of_google(), platform=GCP) is not None
    book = BookFile(folder=google.federation.aggregator).read()
    (member,) = book.members
    assert (member.site, member.machine) == ("site-b", OF_GCP)
    kept = enrolment_machines.kept(google.federation.aggregator, "site-b")
    assert kept == google.federation.way.bodies[-1]


def test_machine_of_amazon_enrols_by_its_role(amazon: Machines, sts: CheckingSts):
    """STS has checked a signature over the binding; nothing secret was sent."""
    token = amazon.invite("site-a", OF_AWS)
    assert amazon.enroll(token, of_amazon, platform=AWS) is not None
    (asked,) = sts.asked
    assert asked["host"] == f"sts.{REGION}.amazonaws.com"
    body = amazon.federation.way.bodies[-1].decode()
    assert AWS_KEYS["AWS_SECRET_ACCESS_KEY"] not in body
    (member,) = BookFile(folder=amazon.federation.aggregator).read().members
    assert member.machine == OF_AWS


@pytest.mark.parametrize(
    ("arn", "words"),
    [
        (arn_of(role="other"), "role 'other'"),
        (arn_of(account="999999999999"), "account '999999999999'"),
        (arn_of(session="i-0fedcba9876543210"), "instance 'i-0fed"),
        (f"arn:aws:iam::{ACCOUNT}:user/anna", "no role of a machine"),
        (arn_of(session="botocore-session-1"), "no role of a machine"),
        (f"arn:aws:iam::{ACCOUNT}:root", "no role of a machine"),
        (f"{arn_of()}\n{arn_of(role='other')}", "no role of a machine"),
    ],
)
def test_another_principal_of_amazon_is_refused(
    amazon: Machines, sts: CheckingSts, arn: str, words: str
):
    """By what STS says, letter by letter."""
    sts.arn = arn
    amazon.refused(of_amazon, words, platform=AWS, site="site-a")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("x-crossfed-binding", "x-amz-other", "signs .* and not the binding"),
        (";x-crossfed-binding", "", "signs .* and not the binding"),
        (f"/{REGION}/sts", "/us-east-1/sts", "not for region"),
        ("/sts/", "/iam/", "not signed by a role"),
        ("Credential=ASIA", "Credential=AKIA", "not signed by a role"),
        ("Signature=", "Signature=\r\nX: ", "not signed by a role"),
    ],
)
def test_signature_of_something_else_is_refused(
    amazon: Machines, sts: CheckingSts, old: str, new: str, words: str
):
    """Before STS is asked."""

    def prove(binding: str) -> str:
        found = json.loads(of_amazon(binding))
        assert old in found["authorization"]
        found["authorization"] = found["authorization"].replace(old, new)
        return json.dumps(found)

    amazon.refused(prove, words, platform=AWS, site="site-a")
    assert sts.asked == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda proof: {**proof, "token": "a\r\nHost: evil.example"},
        lambda proof: {**proof, "date": "20261123T000000Z\r\nX: y"},
        lambda proof: {**proof, "date": "20269999T999999Z"},
        lambda proof: {**proof, "host": "evil.example"},
        lambda proof: {**proof, "url": "https://evil.example/"},
        lambda proof: {key: proof[key] for key in ("date", "token")},
        lambda proof: {**proof, "token": ["x"]},
        lambda _: [],
    ],
)
def test_proof_cannot_choose_what_is_asked(
    amazon: Machines, sts: CheckingSts, spoil: Callable[[Any], Any]
):
    """Neither host nor header nor path comes from a machine."""

    def prove(binding: str) -> str:
        return json.dumps(spoil(json.loads(of_amazon(binding))))

    amazon.refused(prove, "not a proof of AWS", platform=AWS, site="site-a")
    assert sts.asked == []


def test_old_signature_is_refused(amazon: Machines, sts: CheckingSts):
    """Also by who does not ask STS, which would refuse it five minutes later."""

    def prove(binding: str) -> str:
        found = json.loads(of_amazon(binding))
        day, _, rest = found["date"].partition("T")
        found["date"] = f"{int(day[:4]) - 1}{day[4:]}T{rest}"
        found["authorization"] = found["authorization"].replace(day, found["date"][:8])
        return json.dumps(found)

    amazon.refused(prove, "s old by this clock", platform=AWS, site="site-a")
    assert sts.asked == []


def test_long_lived_keys_prove_nothing(
    amazon: Machines, monkeypatch: pytest.MonkeyPatch
):
    """They say nothing about a machine."""
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    with pytest.raises(Exception, match="long-lived keys"):
        amazon.enroll(amazon.invite("site-a", OF_AWS), of_amazon, platform=AWS)


@pytest.mark.parametrize(
    "answer",
    [
        json_answer({}),
        json_answer({"GetCallerIdentityResponse": []}),
        Answer(200, {}, b"<Arn>" + arn_of().encode() + b"</Arn>"),
        Answer(302, {"Location": "http://127.0.0.1:1/"}, b""),
    ],
)
def test_answer_that_is_not_of_sts_is_none(
    amazon: Machines, sts: CheckingSts, answer: Answer
):
    """No redirect is followed, and nothing is searched for in a text."""
    sts.says = lambda _: answer
    amazon.refused(of_amazon, "AWS", platform=AWS, site="site-a")


@pytest.mark.parametrize("body", [b"x" * (1 << 17), b""])
def test_sts_that_is_ill_is_asked_again_later(
    amazon: Machines, sts: CheckingSts, body: bytes
):
    """The machine tries again, and the aggregator says no more than that."""
    sts.says = lambda _: Answer(503 if not body else 200, {}, body)
    token = amazon.invite("site-a", OF_AWS)
    with pytest.raises(EnrolmentRefused, match="cannot enrol sites now") as caught:
        enrol.enroll(
            token,
            amazon.federation.folder / "x",
            organisation="A",
            clock=VirtualClock(NOW),
            connect=lambda *_: amazon.federation.way,
            vouched=enrol.MachineProof(platform=AWS, prove=of_amazon),
        )
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"machine": {"project_id": "p-2"}}, "project 'p-2'"),
        ({"machine": {"instance_name": "other"}}, "instance 'europe-west4-a/other'"),
        ({"machine": {"zone": "europe-west4-b"}}, "instance 'europe-west4-b/site-b'"),
        ({"email": "other@p-1.iam.gserviceaccount.com"}, "service account 'other@"),
        ({"email_verified": False}, "no service account or machine"),
        ({"email_verified": "true"}, "no service account or machine"),
        ({"google": {}}, "about no machine"),
        ({"google": "x"}, "about no machine"),
        ({"iss": "https://evil.example"}, "not issued by Google"),
        ({"exp": int(NOW) - 61}, "expired 61 s ago"),
        ({"iat": int(NOW) - 601}, "601 s old"),
        ({"iat": int(NOW) + 120}, "-120 s old"),
        ({"iat": None}, "does not say when"),
        ({"exp": True}, "does not say when"),
        ({"key": "stranger"}, "not signed by Google"),
        ({"head": {"kid": "unknown"}}, "no key of Google"),
        ({"head": {"kid": ["google"]}}, "no key of Google"),
        ({"head": {"alg": "none"}}, "not signed with RS256"),
        ({"head": {"alg": "HS256"}}, "not signed with RS256"),
        ({"aud": ["x"]}, "made for other keys"),
    ],
)
def test_another_token_of_google_is_refused(
    google: Machines, claims: dict[str, Any], words: str
):
    """Each claim counts."""
    google.refused(of_google(**claims), words)


@pytest.mark.parametrize(
    "text", ["", "a.b", "a.b.c", "é.é.é", "e30.e30.e30", "." * 9000]
)
def test_what_is_no_token_is_refused(google: Machines, text: str):
    """Whatever it is."""
    google.refused(lambda _: text or " ", "token|characters")


def test_unsigned_token_is_refused(google: Machines):
    """With the algorithm that asks for no signature, in each of its spellings."""

    def prove(binding: str) -> str:
        whole = of_google()(binding)
        _, claims, _ = whole.split(".")
        head = base64.urlsafe_b64encode(b'{"alg":"None","kid":"google"}').rstrip(b"=")
        return f"{head.decode()}.{claims}."

    google.refused(prove, "RS256")


def test_who_invents_ids_of_keys_makes_google_work_once(tmp_path: Path):
    """Google's page is not asked for each of them."""
    with GoogleMachine() as server:
        clock = VirtualClock(NOW)
        made = Machines(tmp_path, clock, "", f"{server.url}/certs")
        made.invite("site-b", OF_GCP)
        for number in range(5):
            made.refused(of_google(head={"kid": f"k{number}"}), "no key of Google")
        assert server.looks == 1
        clock.sleep(31.0)
        server.certificates["new"] = fake_platforms.certificate_of("new")
        token = made.invite("site-b", OF_GCP)
        prove = of_google(clock, key="new", head={"kid": "new"})
        assert made.enroll(token, prove, platform=GCP) is not None
        assert server.looks == 2


OTHER = "ab" * 32


def request(token: Token, platform: str, prove: Prove) -> bytes:
    """What a machine sends, with keys of its own."""
    return messages.request_enrolment(
        token,
        organisation="Test",
        release="1",
        identity=identity.generate(os.urandom),
        node_key=ec.generate_private_key(ec.SECP384R1()),
        key=new_key(),
        platform=platform,
        prove=prove,
    )


def test_request_to_another_aggregator_is_refused(google: Machines):
    """One that invites a machine itself cannot pass on what that has sent."""
    token = google.invite("site-b", OF_GCP)
    body = request(replace(token, authority=OTHER), GCP, of_google())
    status, answer = google.federation.service().handle(body)
    assert (status, "of the node key" in answer.decode()) == (403, True)


def test_proofs_for_another_aggregator_are_refused(
    google: Machines, amazon: Machines, sts: CheckingSts
):
    """Nor can it enrol keys of its own with them."""
    taken: list[str] = []

    def take(prove: Prove) -> Prove:
        def taking(binding: str) -> str:
            taken.append(prove(binding))
            return taken[-1]

        return taking

    request(
        replace(google.invite("site-b", OF_GCP), authority=OTHER),
        GCP,
        take(of_google()),
    )
    google.refused(lambda _: taken[-1], "for other keys, another site or another")
    request(
        replace(amazon.invite("site-a", OF_AWS), authority=OTHER), AWS, take(of_amazon)
    )
    again = "for other keys, another site or another"
    amazon.refused(lambda _: taken[-1], again, platform=AWS, site="site-a")
    assert len(sts.asked) == 1


def test_replay_with_other_keys_is_refused(google: Machines):
    """Whoever has recorded a request has nothing: it enrols the same keys."""
    token = google.invite("site-b", OF_GCP)
    google.enroll(token, of_google(), platform=GCP)
    (body,) = google.federation.way.bodies
    whole = json.loads(body)
    other = json.loads(request(token, GCP, of_google()))
    for name in ("identity", "node_key", "request"):
        mixed = {**whole, name: other[name]}
        status, _ = google.federation.service().handle(json.dumps(mixed).encode())
        assert status == 403
    mixed = {**other, "proof": whole["proof"]}
    status, answer = google.federation.service().handle(json.dumps(mixed).encode())
    assert (status, "made for other keys" in answer.decode()) == (403, True)
    # The same again changes nothing, but for one certificate more.
    before = BookFile(folder=google.federation.aggregator).read().members
    assert google.federation.service().handle(body)[0] == 200
    (after,) = BookFile(folder=google.federation.aggregator).read().members
    assert replace(after, certificates=()) == replace(before[0], certificates=())


def test_invitation_is_for_one_set_of_keys(google: Machines):
    """The same machine with others has lost its own, or is not alone on it."""
    token = google.invite("site-b", OF_GCP)
    google.enroll(token, of_google(), platform=GCP)
    with pytest.raises(EnrolmentRefused, match="enrolled already, with other"):
        google.enroll(token, of_google(), platform=GCP, folder="x")
    # Nor does another invitation admit them, while the site is enrolled.
    elsewhere = replace(OF_GCP, instance=f"{ZONE}/another")
    google.invite("site-b", elsewhere)
    prove = of_google(machine={"instance_name": "another"})
    with pytest.raises(EnrolmentRefused, match="enrolled with different keys"):
        google.enroll(token, prove, platform=GCP, folder="y")
    # The same keys on another machine are the same site.
    folder = google.federation.folder / "site-b"
    (folder / "site.pem").unlink()
    assert google.enroll(token, prove, platform=GCP) is not None
    google.federation.revoke("site-b")
    assert BookFile(folder=google.federation.aggregator).read().bound == ()
    (folder / "site.pem").unlink()
    google.invite("site-b", elsewhere)
    with pytest.raises(EnrolmentRefused, match="was revoked"):
        google.enroll(token, prove, platform=GCP)


def test_nobody_is_asked_about_machines_that_are_not_invited(
    amazon: Machines, sts: CheckingSts
):
    """STS is not for strangers to ask through us."""
    token = replace(amazon.invite("site-a", OF_AWS), site="site-c")
    body = request(token, AWS, of_amazon)
    status, answer = amazon.federation.service().handle(body)
    assert (status, "yet" in json.loads(answer)["refused"]) == (425, True)
    assert sts.asked == []


def test_expired_invitation_of_a_machine_admits_nobody(google: Machines):
    """To the second, and its cloud is not asked."""
    token, clock = google.invite("site-a", OF_GCP), google.federation.clock
    clock.sleep(TOKEN_SECONDS)
    body = request(token, GCP, of_google(clock))
    status, answer = google.federation.service().handle(body)
    assert (status, "yet" in json.loads(answer)["refused"]) == (425, True)
    google.invite("site-a", OF_GCP)
    assert google.federation.service().handle(body)[0] == 200


def test_invitation_that_changes_while_a_cloud_is_asked_admits_nobody(
    google: Machines,
):
    """The answer is about the machine that was invited before."""
    token, service = google.invite("site-a", OF_GCP), google.federation.service()
    other = of_service_account(EMAIL, project=PROJECT, instance=f"{ZONE}/other")

    class Slow(PlatformVerifier):
        def verify(self, *asked: Any) -> PlatformIdentity:
            found = service.verifier.verify(*asked)
            google.invite("site-a", other)
            return found

    slow = replace(service, verifier=Slow(clock=google.federation.clock))
    body = request(token, GCP, of_google(google.federation.clock))
    status, answer = slow.handle(body)
    assert status == 403
    assert "another machine" in json.loads(answer)["refused"]


def test_machine_waits_until_it_is_invited(google: Machines):
    """The invitation names the machine, so it comes after the machine."""
    token = replace(google.invite("site-b", OF_GCP), site="site-d")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        google.invite("site-d", OF_GCP)

    found = enrolment_machine.enroll_machine(
        token,
        google.federation.folder / "site-d",
        organisation="Test",
        platform=GCP,
        prove=of_google(google.federation.clock),
        clock=google.federation.clock,
        connect=lambda *_: google.federation.way,
        listener=say,
    )
    assert found is not None
    (waiting,) = said
    assert "no machine of 'gcp' is invited as site 'site-d' yet" in waiting


def test_tokens_with_and_without_a_secret_are_not_mixed(google: Machines):
    """Neither opens the other's door."""
    secret, token = google.federation.invite("site-e"), google.invite("site-b", OF_GCP)
    with pytest.raises(EnrolmentRefused, match="is used alone"):
        google.enroll(secret, of_google(), platform=GCP)
    with pytest.raises(EnrolmentRefused, match="is used alone"):
        google.federation.enroll(token)
    whole = json.loads(request(token, GCP, of_google()))
    for changed in ({"secret": "00" * 32}, {"platform": ""}, {"proof": ""}):
        body = json.dumps({**whole, **changed}).encode()
        assert google.federation.service().handle(body)[0] == 400
    # An empty secret, which whoever reads a token has.
    bare = {**whole, "platform": "", "proof": "", "secret": ""}
    assert google.federation.service().handle(json.dumps(bare).encode())[0] == 400


class Waiting:
    """A machine that waits for its roster, and what happens meanwhile."""

    def __init__(self, machines: Machines, deed: Callable[[], None]) -> None:
        self.machines, self.deed = machines, deed
        self.folder = machines.prepare("site-b")
        self.said: list[str] = []

    def run(self, patience_seconds: float = 60.0) -> None:
        made = self.machines.federation

        def say(text: str) -> None:
            self.said.append(text)
            self.deed()

        enrolment_machine.enroll_machine(
            self.machines.invite("site-b", OF_GCP),
            self.folder,
            organisation="Test",
            platform=GCP,
            prove=of_google(made.clock),
            clock=made.clock,
            connect=lambda *_: made.way,
            patience_seconds=patience_seconds,
            listener=say,
        )

    @property
    def config(self) -> site_file.SiteConfig:
        return site_file.load(self.folder / "site.toml")


def test_machine_trusts_the_roster_that_its_operator_has_signed(google: Machines):
    """And no other before: it has no roster at all."""
    waiting: list[Waiting] = []

    def sign() -> None:
        assert not waiting[0].config.roster.exists()
        google.sign()

    waiting.append(Waiting(google, sign))
    waiting[0].run()
    assert "signature of the operator" in waiting[0].said[0]
    assert roster.load(waiting[0].config.roster) == google.roster()
    # Once more, as after a restart of the machine: nothing is left to do.
    bodies = len(google.federation.way.bodies)
    waiting[0].run()
    assert len(google.federation.way.bodies) == bodies


STRANGER = identity.generate(lambda n: bytes(range(1, n + 1)))


def test_signature_of_another_roster_is_not_passed_on(google: Machines):
    """A damaged one is told to the log, and costs no site its enrolment."""
    federation = google.federation
    federation.site("site-a")
    folder, path = federation.aggregator, federation.aggregator / "roster.toml"
    signed = roster.load(path)
    enrolment_machines.keep_signature(folder, signed, "ab" * 64)
    assert enrolment_machines.signature_of(folder, signed) == "ab" * 64
    federation.site("site-b")
    assert enrolment_machines.signature_of(folder, roster.load(path)) == ""
    (folder / "roster.signature").write_text("{")
    federation.site("site-c")
    assert any("roster.signature is damaged" in line for line in federation.said)


@pytest.mark.parametrize(
    "forge",
    [
        lambda google: google.sign(STRANGER),
        lambda google: google.sign(authority=OTHER),
        lambda google: google.sign(
            roster=replace(google.roster(), serial=google.roster().serial + 1)
        ),
        lambda google: google.sign(roster=_with_other_key(google.roster(), "site-b")),
        lambda google: enrolment_machines.keep_signature(
            google.federation.aggregator, google.roster(), "00" * 64
        ),
    ],
)
def test_aggregator_cannot_make_a_roster(
    google: Machines, forge: Callable[[Machines], None]
):
    """Without the operator's key; the machine waits, and ends."""
    waiting = Waiting(google, lambda: forge(google))
    with pytest.raises(RosterRefused, match=r"is not signed .*the operator"):
        waiting.run()
    assert not waiting.config.roster.exists()


def _with_other_key(found: roster.Roster, site: str) -> roster.Roster:
    entries = [
        replace(entry, public_key=STRANGER.public.key) if entry.site == site else entry
        for entry in found.sites
    ]
    return replace(found, sites=tuple(entries))


def test_swapped_key_is_refused_although_the_rest_is_signed(google: Machines):
    """The aggregator swaps another site's key, and keeps serial and signature."""
    google.federation.site("site-a")
    waiting = Waiting(google, google.sign)
    waiting.run()
    signed = google.roster()
    path = google.federation.aggregator / "roster.toml"
    swapped = _with_other_key(signed, "site-a")
    signature = enrolment_machines.signature_of(path.parent, signed)
    roster.save(swapped, path)
    enrolment_machines.keep_signature(path.parent, swapped, signature)
    said: list[str] = []
    enrolment_machine.refresh(
        waiting.config,
        clock=google.federation.clock,
        listener=said.append,
        connect=lambda *_: google.federation.way,
    )
    assert "is not signed by" in said[0]
    assert roster.load(waiting.config.roster) == signed


def test_older_signed_roster_is_refused(google: Machines):
    """It may hold a site that has been revoked since."""
    google.federation.site("site-a")
    waiting = Waiting(google, google.sign)
    waiting.run()
    before = google.roster()
    google.federation.revoke("site-a")
    google.sign()
    said: list[str] = []

    def refresh() -> None:
        enrolment_machine.refresh(
            waiting.config,
            clock=google.federation.clock,
            listener=said.append,
            connect=lambda *_: google.federation.way,
        )

    refresh()
    assert said == [
        f"roster {google.roster().serial} is signed by the operator: accepted"
    ]
    roster.save(before, google.federation.aggregator / "roster.toml")
    google.sign()
    refresh()
    assert "this site already has" in said[1]
    assert "site-a" not in {e.site for e in roster.load(waiting.config.roster).sites}


@pytest.mark.slow
def test_machine_proves_itself_again_while_it_waits(google: Machines):
    """Whoever checks the proof may come late, and a proof holds for ten minutes."""
    waiting = Waiting(google, lambda: None)
    with pytest.raises(RosterRefused):
        waiting.run(patience_seconds=600.0)
    enrolments = [
        json.loads(body)
        for body in google.federation.way.bodies
        if json.loads(body)["kind"] == "enrolment"
    ]
    assert len(enrolments) == 2
    assert len({each["identity"] for each in enrolments}) == 1


def test_site_toml_of_another_site_is_refused(google: Machines):
    """Its operator would have settings that were meant for somebody else."""
    google.prepare("site-x")
    with pytest.raises(EnrolmentRefused, match="is of site 'site-x'"):
        google.enroll(
            google.invite("site-b", OF_GCP), of_google(), platform=GCP, folder="site-x"
        )
