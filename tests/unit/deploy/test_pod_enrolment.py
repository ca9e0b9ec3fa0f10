"""Pods enrol with the keys that they have shown in their log, and with no others."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.enrolments import Federation

from cloud_adapters.identity import platforms
from deploy.aggregator_host import enrolment_machines, enrolment_operator
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.fleet import roster_operator, wanted
from deploy.fleet.bootstrap import MachineInvitation
from deploy.fleet.roster_operator import Operator
from deploy.site_host import enrol, enrolment_machine
from deploy.site_host.enrol import MachineProof
from federation import platform_identity
from federation.errors import ProofRefused
from federation.platform_identity import KUBERNETES, PlatformIdentity
from privacy.membership import messages
from privacy.membership.certificates import Authority
from privacy.membership.token import EnrolmentRefused, Token
from privacy.secagg.agreement import identity

CLUSTER, JOB = "gke/crossfed", "crossfed-site-b-0123456789ab"
OTHERS = "cd" * 32


class Pods:
    """An aggregator and its operator, who reads logs."""

    def __init__(self, folder: Path) -> None:
        self.federation = Federation(folder=folder)
        self.log: list[str] = []
        self.prove = platforms.prover(KUBERNETES, "", self.write)

    def write(self, text: str) -> None:
        self.log.append(f"crossfed: {text}")

    @property
    def shown(self) -> str:
        return platforms.shown_keys("\n".join(self.log))

    @property
    def token(self) -> Token:
        made = self.federation
        found = Authority.load(made.aggregator, clock=made.clock).fingerprint
        return Token(
            address="127.0.0.1:8443", authority=found, site="site-b", secret=b""
        )

    def expected(self, keys: str, job: str = JOB) -> PlatformIdentity:
        return platform_identity.of_pod(keys, cluster=CLUSTER, job=job)

    def invite(self, keys: str, job: str = JOB) -> None:
        enrolment_operator.invite_machine(
            self.federation.config,
            "site-b",
            self.expected(keys, job),
            clock=self.federation.clock,
        )

    def enroll(
        self, folder: str = "site-b", prove: messages.Prove | None = None
    ) -> None:
        enrol.enroll(
            self.token,
            self.federation.folder / folder,
            organisation="Test",
            clock=self.federation.clock,
            connect=lambda *_: self.federation.way,
            vouched=MachineProof(platform=KUBERNETES, prove=prove or self.prove),
        )

    def show(self, folder: str = "site-b") -> str:
        """Have a pod make its keys and ask for the first time."""
        with pytest.raises(EnrolmentRefused) as caught:
            self.enroll(folder)
        assert caught.value.status == messages.TOO_EARLY
        return self.shown

    def operator(self) -> Operator:
        return roster_operator.open_operator(
            self.federation.folder,
            self.federation.aggregator,
            random_bytes=os.urandom,
            verifier=self.federation.verifier,
        )

    @property
    def members(self) -> set[str]:
        book = BookFile(folder=self.federation.aggregator).read()
        return {"site-b"} if book.member("site-b") is not None else set()


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path)


def test_a_pod_enrols_with_the_keys_that_it_has_shown(pods: Pods):
    """It shows them once, and asks until it is invited; its operator checks it."""
    keys = pods.show()
    assert pods.show() == keys
    assert len(pods.log) == 1
    pods.invite(keys)
    pods.enroll()
    made = pods.federation.folder / "site-b" / "identity.pem"
    checked = pods.operator().checked("site-b", pods.expected(keys))
    assert checked == identity.load(made).public.key
    assert pods.operator().machine("site-b") == pods.expected(keys)
    # An answer that was lost is no harm, though nothing but the keys is the same.
    pods.enroll()


def test_other_keys_do_not_enrol(pods: Pods):
    """Those of somebody who was faster, for example, with the same public token."""
    keys = pods.show()
    pods.invite(keys)
    pods.log.clear()
    assert pods.show("faster") != keys
    assert pods.members == set()
    pods.enroll()
    assert pods.members == {"site-b"}


def test_a_pod_that_follows_one_waits_until_its_own_keys_are_invited(pods: Pods):
    """The one before it has gone before it enrolled, and was invited."""
    pods.invite(pods.show("gone"))
    pods.log.clear()
    pods.prove = platforms.prover(KUBERNETES, "", pods.write)
    pods.invite(pods.show(), "crossfed-site-b-following")
    pods.enroll()
    assert pods.members == {"site-b"}


@pytest.mark.parametrize("lie", [lambda keys: keys, lambda _: "x"])
def test_a_proof_says_nothing_that_keys_do_not(pods: Pods, lie: Callable[[str], str]):
    """Whoever has read the digest has not got the keys."""
    keys = pods.show()
    pods.invite(keys)
    with pytest.raises(EnrolmentRefused):
        pods.enroll("thief", prove=lambda _: lie(keys))
    assert pods.members == set()


def test_the_operator_finds_out_if_the_aggregator_let_others_in(pods: Pods):
    """It knows from the cluster, and not from the aggregator, which keys there are."""
    keys = pods.show()
    pods.log.clear()
    others = pods.show("others")
    pods.invite(others)
    pods.enroll("others")
    with pytest.raises(ProofRefused, match="keys"):
        pods.operator().checked("site-b", pods.expected(keys))


def test_a_machine_of_a_cloud_is_no_pod(pods: Pods):
    """What is expected to come from one does not come from the other."""
    keys = pods.show()
    expected = platform_identity.of_service_account(
        "site@p-1.iam.gserviceaccount.com", project="p-1"
    )
    enrolment_operator.invite_machine(
        pods.federation.config, "site-b", expected, clock=pods.federation.clock
    )
    with pytest.raises(EnrolmentRefused, match="no machine of 'kubernetes' is invited"):
        pods.enroll()
    pods.invite(keys)
    pods.enroll()
    with pytest.raises(EnrolmentRefused, match="not from its machine"):
        pods.operator().checked("site-b", expected)


def test_keys_are_of_one_aggregator_and_one_site(pods: Pods):
    """Shown for one, they are worth nothing at another."""
    keys = pods.show()
    pods.invite(keys)
    pods.enroll()
    body = enrolment_machines.kept(pods.federation.aggregator, "site-b")
    assert body is not None
    asked = messages.read_request(body)
    assert isinstance(asked, messages.Enrolment)
    assert messages.binding(asked, pods.token.authority) == keys
    assert messages.binding(asked, OTHERS) != keys
    other = replace(asked, site="site-c")
    assert messages.binding(other, pods.token.authority) != keys


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("", ""),
        (f"crossfed: the keys of this site are {OTHERS}", OTHERS),
        (f"crossfed: the keys of this site are {OTHERS}\r\nmore", OTHERS),
        # Of what others say, nothing is a line of its own.
        (f"crossfed: waiting: the keys of this site are {OTHERS}", ""),
        (f"crossfed: waiting: x\x0bcrossfed: the keys of this site are {OTHERS}", ""),
        (f"crossfed: waiting: x\u2028crossfed: the keys of this site are {OTHERS}", ""),
        (f"crossfed: the keys of this site are {OTHERS[1:]}", ""),
        (f"crossfed: the keys of this site are {OTHERS.upper()}", ""),
    ],
)
def test_only_the_pods_own_line_counts(log: str, found: str):
    assert platforms.shown_keys(log) == found


def test_the_first_line_counts():
    """A program that begins later cannot change what was shown."""
    lines = [
        f"crossfed: the keys of this site are {each * 32}" for each in ("ab", "cd")
    ]
    assert platforms.shown_keys("\n".join(lines)) == "ab" * 32


@pytest.mark.parametrize(
    ("keys", "cluster", "job"),
    [("x", CLUSTER, JOB), (OTHERS, "", JOB), (OTHERS, "a\nb", JOB), (OTHERS, "a", "B")],
)
def test_a_pod_is_named_in_one_way(keys: str, cluster: str, job: str):
    with pytest.raises(ValueError, match="is no"):
        platform_identity.of_pod(keys, cluster=cluster, job=job)


def test_a_machine_waits_for_its_invitation(pods: Pods):
    """The operator reads the log meanwhile."""
    folder = pods.federation.folder / "site-b"

    def invite(_: str) -> None:
        if not pods.members and pods.shown:
            pods.invite(pods.shown)

    enrolment_machine.enroll_machine(
        pods.token,
        folder,
        organisation="Test",
        platform=KUBERNETES,
        prove=pods.prove,
        clock=pods.federation.clock,
        connect=lambda *_: pods.federation.way,
        listener=invite,
    )
    assert pods.members == {"site-b"}


def test_words_of_people_are_words_for_the_shell():
    """An organisation's name runs nothing."""
    invitation = MachineInvitation(
        token="", organisation="a'; rm -rf $(HOME) {x}", platform=KUBERNETES
    )
    shell, option, script = wanted.pod_command(invitation)
    assert (shell, option) == ("/bin/sh", "-c")
    assert "'a'\"'\"'; rm -rf $(HOME) {x}'" in script
