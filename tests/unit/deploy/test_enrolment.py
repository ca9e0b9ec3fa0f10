"""Enrolment: who gets in, who does not, and what a site and the aggregator write."""

import json
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import assume, given, strategies as st
from support.enrolments import NOW, Federation
from support.examples import few

from clients.privacy.policy_spec import PolicySpec
from deploy.aggregator_host import enrolment_operator
from deploy.aggregator_host.enrolment_book import (
    BookDamaged,
    BookFile,
    EnrolmentBook,
    Invitation,
)
from deploy.site_host import enrol as enrolment_site, enrolment_roster
from federation.errors import FederationError
from privacy.membership import certificates, messages as enrolment, roster_file
from privacy.membership.certificates import Authority, new_key, signing_request
from privacy.membership.token import EnrolmentRefused, Token
from privacy.secagg.agreement import identity, roster
from privacy.secagg.errors import KeyFileRefused, RosterRefused, StaleRoster

DAY = 86_400.0


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(folder=tmp_path)


def test_token_reads_back():
    """Also with an address of version 6, and a site whose name has dots."""
    for address in ("fed.example.org:8443", "[2001:db8::1]:443", "10.0.0.1:1"):
        token = Token(
            address=address, authority="ab" * 32, site="a.b-c_d", secret=bytes(32)
        )
        assert Token.parse(f" {token.text}\n") == token


def test_site_named_like_a_fingerprint_is_told_from_one():
    """A name of 64 hexadecimal digits is a name."""
    token = Token(
        address="h.cd:1", authority="ab" * 32, site="cd" * 32, secret=bytes(32)
    )
    assert Token.parse(token.text) == token


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-1],
        lambda text: text[10:],
        lambda text: text + "x",
        lambda text: text.replace("crossfed-1", "crossfed-2"),
        lambda text: text.replace(":8443", ""),
        lambda text: text.replace(":8443", ":99999"),
        lambda text: text.replace("site-a", "Site-a"),
        lambda text: text.replace("site-a", "site..a"),
        lambda _: "",
        lambda _: "\0" * 10_000,
    ],
)
def test_half_a_token_is_refused(spoil: Callable[[str], str]):
    """A slip of the mouse is told from an attack."""
    token = Token(
        address="host:8443", authority="ab" * 32, site="site-a", secret=bytes(32)
    )
    with pytest.raises(EnrolmentRefused, match="token"):
        Token.parse(spoil(token.text))


def test_secret_is_not_printed():
    """Nor kept: only its hash is in the aggregator's folder."""
    token = Token(address="h:1", authority="", site="a", secret=b"s" * 32)
    assert "ssss" not in repr(token)


def test_enrolled_site_has_what_it_needs(federation: Federation):
    """Keys, certificate, roster and a configuration that loads."""
    site = federation.site("site-a")

    config = site.config
    members = roster.load(config.roster)
    assert config.file.name == "site-a"
    assert config.file.aggregator.address == "127.0.0.1:8443"
    assert identity.load(config.identity).public.key == members.sites[0].public_key
    assert certificates.load_key(config.node_key).curve.name == "secp384r1"
    certificate = x509.load_pem_x509_certificate(config.certificate.read_bytes())
    authority = Authority.load(federation.aggregator, clock=federation.clock)
    authority.check_issued(certificate)
    assert config.authority.read_bytes() == authority.pem
    node = certificates.load_key(config.node_key)
    assert list(federation.nodes.known) == [enrolment.public_pem(node)]


def test_functions_of_a_new_site_only_need_to_be_uncommented(federation: Federation):
    """Its operator adds names to the default ones."""
    folder = federation.site("site-a").config.folder
    path = folder / "site.toml"
    text = path.read_text()
    assert text.count("\n# functions = [") == 1
    path.write_text(text.replace("\n# functions = [", '\nfunctions = ["mine:net", '))
    found = enrolment_site.config_of(folder).file.policy.functions
    assert found == ("mine:net", *PolicySpec().functions)


def test_key_files_are_their_owners_alone(federation: Federation):
    """At the site and at the aggregator, whatever the umask is."""
    site = federation.site("site-a")
    for path in (
        *(site.folder / name for name in ("identity.pem", "node.pem", "site.pem")),
        federation.aggregator / "sites.json",
        federation.aggregator / "sites.lock",
    ):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(site.folder.stat().st_mode) == 0o700


def test_no_private_key_leaves_the_site(federation: Federation):
    """Neither as PEM, nor its numbers in any spelling; the secret is not kept."""
    token = federation.invite("site-a")
    federation.enroll(token)
    site = federation.folder / "site-a"
    enrolment_site.renew(
        enrolment_site.config_of(site),
        clock=federation.clock,
        connect=lambda *_: federation.way,
    )
    kept = [p.read_bytes() for p in federation.aggregator.iterdir() if p.is_file()]
    seen = b"".join([*federation.way.bodies, *kept]).lower()
    own = b"".join((federation.aggregator / n).read_bytes() for n in _OWN_KEYS).lower()
    assert seen.count(b"private key") == own.count(b"private key")
    for name in ("node.pem", "site.pem"):
        number = certificates.load_key(site / name).private_numbers().private_value
        assert f"{number:x}".encode() not in seen
    assert token.secret.hex().encode() in federation.way.bodies[0]
    assert token.secret.hex().encode() not in b"".join(kept)
    assert token.text.rpartition(".")[2].encode() not in b"".join(kept)


_OWN_KEYS = ("ca.key", "aggregator.pem", "server.key")


def test_token_expires(federation: Federation):
    """After an hour, and not before."""
    token = federation.invite("site-a")
    federation.clock.sleep(3600.0)

    with pytest.raises(EnrolmentRefused, match=r"expired.*new one"):
        federation.enroll(token)
    assert not federation.nodes.known


def test_token_is_used_once(federation: Federation):
    """Other keys do not get in with it; the message says what that may mean."""
    token = federation.invite("site-a")
    federation.enroll(token)

    with pytest.raises(EnrolmentRefused, match=r"used already.*revoke 'site-a'"):
        federation.enroll(token, "elsewhere")
    assert len(federation.nodes.known) == 1


def test_lost_answer_is_asked_for_again(federation: Federation):
    """The same keys and token: the same site, and nothing is counted twice."""
    token = federation.invite("site-a")
    federation.enroll(token)
    first = roster.load(federation.aggregator / "roster.toml")
    (federation.folder / "site-a" / "site.pem").unlink()

    federation.enroll(token)

    assert roster.load(federation.aggregator / "roster.toml") == first
    assert len(federation.nodes.known) == 1


def test_a_certificate_is_the_last_that_is_written(federation: Federation):
    """Who finds one finds a complete site, though its command was killed then."""
    token = federation.invite("site-a")
    folder = federation.folder / "site-a"

    def connect(*_: object) -> Any:
        (folder / "site.pem").mkdir(exist_ok=True)  # It cannot be written.
        return federation.way

    with pytest.raises(KeyFileRefused, match=r"site\.pem"):
        enrolment_site.enroll(
            token,
            folder,
            organisation="site-a",
            clock=federation.clock,
            connect=connect,
        )
    assert {"ca.crt", "roster.toml", "site.toml"} < {f.name for f in folder.iterdir()}
    (folder / "site.pem").rmdir()
    assert federation.enroll(token).site == "site-a"


def test_outage_of_the_superlink_costs_no_token(federation: Federation):
    """The site asks again; the reason stays in the aggregator's log."""
    token = federation.invite("site-a")
    federation.nodes.is_down = True
    with pytest.raises(EnrolmentRefused, match="same token"):
        federation.enroll(token)
    assert federation.clock.now() == NOW + 30.0, "it may have been starting"
    assert any("is down" in line for line in federation.said)
    assert not (federation.folder / "site-a" / "site.pem").exists()

    federation.nodes.is_down = False
    with pytest.raises(EnrolmentRefused, match="used already"):
        federation.enroll(token, "thief")
    assert federation.enroll(token).roster.sites[0].site == "site-a"


def test_replay_of_a_captured_request_gains_nothing(federation: Federation):
    """It is answered with a certificate of a key that only the site has; later, no."""
    federation.site("site-a")
    (captured,) = federation.way.bodies
    before = roster.load(federation.aggregator / "roster.toml")

    status, answer = federation.service().handle(captured)
    assert status == 200
    assert b"PRIVATE" not in answer
    assert roster.load(federation.aggregator / "roster.toml") == before
    federation.clock.sleep(3600.0)
    assert federation.service().handle(captured)[0] == 403


def test_replay_does_not_bring_back_a_revoked_site(federation: Federation):
    """Its token goes with it."""
    federation.site("site-a")
    federation.revoke("site-a")

    assert federation.service().handle(federation.way.bodies[0])[0] == 403
    assert not federation.nodes.known


def test_two_that_race_with_one_token(federation: Federation):
    """One gets in, whichever it is."""
    token = federation.invite("site-a")
    outcomes: list[str] = []

    def enroll(folder: str) -> None:
        try:
            federation.enroll(token, folder)
        except EnrolmentRefused as error:
            outcomes.append(str(error))
        else:
            outcomes.append("in")

    threads = [threading.Thread(target=enroll, args=(f"f{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("in") == 1
    assert sum("used already" in text for text in outcomes) == 3
    assert len(federation.nodes.known) == 1
    assert len(roster.load(federation.aggregator / "roster.toml").sites) == 1


def _spoiled(body: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(body), **changes}).encode()


def _request(federation: Federation, site: str = "site-a") -> bytes:
    """A whole request that was not sent."""
    token = federation.invite(site)
    return enrolment.request_enrolment(
        token,
        organisation=site,
        release="1",
        identity=identity.generate(lambda n: bytes(range(n))),
        node_key=ec.generate_private_key(ec.SECP384R1()),
        key=new_key(),
    )


def _pem(curve: ec.EllipticCurve) -> str:
    return enrolment.public_pem(ec.generate_private_key(curve)).decode()


_SPOILS: dict[str, Callable[[], dict[str, Any]]] = {
    "another site": lambda: {"site": "site-b"},
    "unknown secret": lambda: {"secret": "00" * 32},
    "short secret": lambda: {"secret": "00"},
    "secret not hex": lambda: {"secret": "zz"},
    "another organisation": lambda: {"organisation": "Somebody else"},
    "another release": lambda: {"release": "2"},
    "another request": lambda: {
        "request": signing_request("site-a", new_key()).decode()
    },
    "request on another curve": lambda: {
        "request": signing_request(
            "site-a", ec.generate_private_key(ec.SECP384R1())
        ).decode()
    },
    "no request": lambda: {"request": ""},
    "another node key": lambda: {"node_key": _pem(ec.SECP384R1())},
    "node key on another curve": lambda: {"node_key": _pem(ec.SECP256R1())},
    "no node key": lambda: {"node_key": "-----BEGIN"},
    "another identity": lambda: {
        "identity": identity.generate(lambda n: b"x" * n).public.key.hex()
    },
    "identity of zero": lambda: {"identity": "00" * 32},
    "short identity": lambda: {"identity": "00"},
    "no node proof": lambda: {"node_proof": ""},
    "proof not hex": lambda: {"identity_proof": "proof"},
    "no identity proof": lambda: {"identity_proof": "00" * 64},
    "long pem": lambda: {"request": "x" * 5000},
    "long words": lambda: {"organisation": "x" * 300},
    "not printable": lambda: {"organisation": "a\x1b[2J"},
    "lone surrogate": lambda: {"request": "\ud800"},
    "no name": lambda: {"site": "../roster"},
    "other version": lambda: {"version": 2},
    "version of truth": lambda: {"version": True},
    "number for text": lambda: {"site": 1},
    "null": lambda: {"node_key": None},
    "other kind": lambda: {"kind": "something"},
}


@pytest.mark.parametrize("name", _SPOILS)
def test_tampered_enrolment_is_refused(federation: Federation, name: str):
    """Nothing changes but the log, and the token is still good for the real site."""
    body = _request(federation)

    status, answer = federation.service().handle(_spoiled(body, **_SPOILS[name]()))

    assert status in {400, 403}
    assert set(json.loads(answer)) == {"version", "refused"}
    assert not federation.nodes.known
    assert not BookFile(folder=federation.aggregator).read().members
    assert federation.service().handle(body)[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"[" * 60_000, 400),
        (b'{"version": 1, "kind": "enrolment"}', 400),
        (b'{"version": NaN, "kind": "enrolment"}', 400),
        (b'{"kind": {"a": 1}}', 400),
        (b" " * (64 << 10) + b"{}", 413),
        (b"\xff\xfe", 400),
        (b'{"version": ' + b"9" * 5000 + b"}", 400),
    ],
)
def test_malformed_body_is_refused(
    federation: Federation, body: bytes, status: int
) -> None:
    """With a reason, and without a traceback."""
    found, answer = federation.service().handle(body)
    assert found == status
    assert json.loads(answer)["refused"]


@pytest.fixture(scope="module")
def invited(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """One that has handed out the token of a request that is known."""
    made = Federation(folder=tmp_path_factory.mktemp("invited"))
    known = Invitation(digest=_TOKEN.digest, site="site-a", expires=NOW + 1.0)
    BookFile(folder=made.aggregator).write(EnrolmentBook(invitations=(known,)))
    return made


@given(data=st.data())
@few(15)
def test_no_request_breaks_the_service(invited: Federation, data: st.DataObject):
    """Whatever stands in a request: an answer with a reason, and nobody is let in."""
    fields = json.loads(_WHOLE)
    name = data.draw(st.sampled_from(sorted(fields)))
    value = data.draw(
        st.one_of(st.text(max_size=300), st.none(), st.integers(), st.floats())
    )
    at = data.draw(st.integers(0, len(str(fields[name]))))
    assume(value != fields[name])
    spoiled = {**fields, name: value}
    if data.draw(st.booleans()):
        text = str(fields[name])
        spoiled[name] = text[:at] + str(value) + text[at + 1 :]
        assume(spoiled[name] != text)
    before = dict(invited.nodes.known)
    for body in (json.dumps(spoiled).encode(), _WHOLE[: at % len(_WHOLE)]):
        status, answer = invited.service().handle(body)
        assert status in {400, 403, 413}
        assert json.loads(answer)["refused"]
    assert invited.nodes.known == before


def test_the_same_request_whole_is_let_in(invited: Federation):
    """Or the test before could not fail."""
    assert invited.service().handle(_WHOLE)[0] == 200


_TOKEN = Token(address="h:1", authority="ab" * 32, site="site-a", secret=bytes(32))
_WHOLE = enrolment.request_enrolment(
    _TOKEN,
    organisation="A",
    release="1",
    identity=identity.generate(lambda n: bytes(range(n))),
    node_key=ec.generate_private_key(ec.SECP384R1()),
    key=new_key(),
)


def test_key_of_another_site_is_refused(federation: Federation):
    """The same person with two invitations does not enrol one key twice."""
    federation.site("site-a")
    token = federation.invite("site-b")
    for name in ("identity.pem", "node.pem"):
        folder = federation.folder / f"with-{name}"
        folder.mkdir()
        source = federation.folder / "site-a" / name
        (folder / name).write_bytes(source.read_bytes())
        (folder / name).chmod(0o600)
        with pytest.raises(EnrolmentRefused, match="another site"):
            federation.enroll(token, folder.name)


def test_roster_that_pins_another_key_is_not_overwritten(federation: Federation):
    """An operator has pinned it by hand; the token is not spent on it."""
    other = identity.generate(lambda n: b"y" * n).public.key.hex()
    federation.pin("site-a", other)
    token = federation.invite("site-a")
    with pytest.raises(EnrolmentRefused, match="pins another key"):
        federation.enroll(token)
    assert not federation.nodes.known
    assert roster_file.withdraw(federation.aggregator / "roster.toml", site="site-a")
    federation.enroll(token)


def test_enrolled_folder_is_not_enrolled_again(federation: Federation):
    """The command that was meant is named."""
    federation.site("site-a")
    with pytest.raises(EnrolmentRefused, match=r"enroll --renew"):
        federation.enroll(federation.invite("site-b"), "site-a")


def test_enrolled_site_is_not_invited(federation: Federation):
    """Lost keys are revoked first."""
    federation.site("site-a")
    with pytest.raises(EnrolmentRefused, match="revoke site-a"):
        federation.invite("site-a")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": 2}', b"\xff"])
def test_torn_book_stops_everything(federation: Federation, text: bytes):
    """Nobody is let in by a file of which half is lost; the file stays as it is."""
    token = federation.invite("site-a")
    path = federation.aggregator / "sites.json"
    path.write_bytes(text)

    with pytest.raises(EnrolmentRefused, match="log says why"):
        federation.enroll(token)
    with pytest.raises(BookDamaged, match="restore it"):
        federation.invite("site-b")
    with pytest.raises(BookDamaged, match="restore it"):
        federation.revoke("site-a")
    assert path.read_bytes() == text
    assert any("damaged" in line for line in federation.said)


def test_revoked_site_is_on_the_list_and_nowhere_else(federation: Federation):
    """Its certificates are revoked, its node is shut out, its key pinned no more."""
    site = federation.site("site-a")
    federation.site("site-b")
    first = _serial(site.config.certificate)
    site.renew()
    before = roster.load(federation.aggregator / "roster.toml")

    done = federation.revoke("site-a")

    assert done.certificates == 2
    assert done.still_registered is None
    listed = x509.load_pem_x509_crl((federation.aggregator / "ca.crl").read_bytes())
    assert {row.serial_number for row in listed} == {
        first,
        _serial(site.config.certificate),
    }
    after = roster.load(federation.aggregator / "roster.toml")
    assert after.serial == before.serial + 1
    assert [entry.site for entry in after.sites] == ["site-b"]
    assert len(federation.nodes.known) == 1


def _serial(path: Path | None) -> int:
    assert path is not None
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_revoked_site_renews_nothing(federation: Federation):
    """Even where the proxy would let it pass."""
    site = federation.site("site-a")
    federation.revoke("site-a")
    with pytest.raises(EnrolmentRefused, match="revoked"):
        site.renew()


def test_last_site_is_revoked(federation: Federation):
    """The roster is a draft again, which the next enrolment completes."""
    federation.site("site-a")
    federation.revoke("site-a")
    assert roster_file.describe(federation.aggregator / "roster.toml") == (3, "")
    federation.site("site-b")


@pytest.mark.parametrize("renewed", [(), ("identity.pem",), ("node.pem",)])
def test_revoked_keys_never_come_back(renewed: tuple[str, ...], federation: Federation):
    """A new invitation for the same name needs new keys, each of them."""
    site = federation.site("site-a")
    federation.revoke("site-a")
    token = federation.invite("site-a")
    for name in ("site.pem", *renewed):
        (site.folder / name).unlink()
    with pytest.raises(EnrolmentRefused, match="new keys"):
        federation.enroll(token)
    federation.enroll(token, "fresh")


def test_revocation_is_finished_by_doing_it_again(federation: Federation):
    """The SuperLink was down; the rest was done."""
    federation.site("site-a")
    federation.nodes.is_down = True
    assert "down" in str(federation.revoke("site-a").still_registered)
    assert (federation.aggregator / "ca.crl").stat().st_size

    federation.nodes.is_down = False
    assert federation.revoke("site-a").still_registered is None
    assert not federation.nodes.known


def test_revoking_an_invitation_withdraws_it(federation: Federation):
    """A token that went to the wrong person."""
    token = federation.invite("site-a")
    federation.revoke("site-a")
    with pytest.raises(EnrolmentRefused, match="withdrawn"):
        federation.enroll(token)


def test_unknown_site_cannot_be_revoked(federation: Federation):
    """Those that can are named."""
    federation.site("site-a")
    with pytest.raises(EnrolmentRefused, match="enrolled: site-a"):
        federation.revoke("site-b")


def test_list_is_written_anew_before_the_proxy_starts(federation: Federation):
    """It was lost, or a crash came between the book and the list."""
    site = federation.site("site-a")
    federation.revoke("site-a")
    path = federation.aggregator / "ca.crl"
    path.unlink()

    enrolment_operator.prepare(federation.config, clock=federation.clock)

    listed = x509.load_pem_x509_crl(path.read_bytes())
    assert [row.serial_number for row in listed] == [_serial(site.config.certificate)]


def test_older_book_forgets_no_revocation(federation: Federation):
    """Somebody restores a copy of the book, and of the roster, from before it."""
    site, other = federation.site("site-a"), federation.site("site-b")
    serial = _serial(site.config.certificate)
    paths = [federation.aggregator / name for name in ("sites.json", "roster.toml")]
    copies = [path.read_bytes() for path in paths]
    federation.revoke("site-a")
    number = _listed(federation).number
    for path, copy in zip(paths, copies, strict=True):
        path.write_bytes(copy)

    again = enrolment_operator.prepare(federation.config, clock=federation.clock)

    assert again == ("site-a",)
    assert set(_listed(federation).revoked) == {serial}
    assert _listed(federation).number > number
    assert roster_file.pinned(paths[1], site="site-a") is None
    with pytest.raises(EnrolmentRefused, match="revoked"):
        site.renew()
    other.renew()
    assert not enrolment_operator.prepare(federation.config, clock=federation.clock)


def test_revocation_is_listed_while_its_certificate_would_hold(federation: Federation):
    """And no longer, or the list would grow for ever."""
    federation.site("site-a")
    federation.revoke("site-a")
    (federation.aggregator / "sites.json").unlink()
    for days, listed in ((89, 1), (2, 0)):
        federation.clock.sleep(days * DAY)
        enrolment_operator.prepare(federation.config, clock=federation.clock)
        assert len(_listed(federation).revoked) == listed


@pytest.mark.parametrize("text", [b"", b"none", None])
def test_list_of_nobody_says_nothing(federation: Federation, text: bytes | None):
    """It is torn, or another authority's: it is made again from the book."""
    site = federation.site("site-a")
    federation.revoke("site-a")
    other = Authority.create("test", clock=federation.clock)
    path = federation.aggregator / "ca.crl"
    path.write_bytes(other.revocation_list({7: NOW}) if text is None else text)
    enrolment_operator.prepare(federation.config, clock=federation.clock)
    assert set(_listed(federation).revoked) == {_serial(site.config.certificate)}


def _listed(federation: Federation) -> certificates.Revocations:
    authority = Authority.load(federation.aggregator, clock=federation.clock)
    path = federation.aggregator / "ca.crl"
    return authority.read_revocations(path.read_bytes())


def test_certificate_of_the_server_is_renewed(federation: Federation):
    """In its last third, or when the operator has added a name; the key stays."""
    path = federation.aggregator / "server.crt"
    first = path.read_bytes()
    renew = lambda config: enrolment_operator.renew_server(  # noqa: E731
        config, clock=federation.clock
    )
    assert not renew(federation.config)
    file = replace(federation.config.file, hosts=("fed.example.org", "10.0.0.1"))
    wider = replace(federation.config, file=file)
    assert renew(wider)
    assert not renew(wider)
    found = certificates.read_certificate(path)
    assert certificates.names_in(found) == {
        *("fed.example.org", "10.0.0.1", "localhost", "127.0.0.1")
    }
    federation.clock.sleep(61 * DAY)
    enrolment_operator.prepare(wider, clock=federation.clock)
    after = certificates.read_certificate(path)
    assert after.not_valid_after_utc.timestamp() == federation.clock.now() + 90 * DAY
    assert after.public_key() == x509.load_pem_x509_certificate(first).public_key()


def test_renewed_certificate_is_of_a_new_key(federation: Federation):
    """The old one holds, too, until it expires: nothing is interrupted."""
    site = federation.site("site-a")
    before = (site.folder / "site.pem").read_bytes()
    federation.clock.sleep(60 * DAY)

    found = site.renew()

    after = (site.folder / "site.pem").read_bytes()
    assert found.expires == federation.clock.now() + 90 * DAY
    assert before.partition(b"BEGIN PRIVATE")[2] != after.partition(b"BEGIN PRIVATE")[2]
    assert stat.S_IMODE((site.folder / "site.pem").stat().st_mode) == 0o600
    (member,) = BookFile(folder=federation.aggregator).read().members
    assert len(member.certificates) == 2


def test_renewal_is_due_in_the_last_third(federation: Federation):
    """And is not asked for before."""
    site = federation.site("site-a")
    due = lambda: enrolment_site.renew_when_due(  # noqa: E731
        site.config, clock=federation.clock, connect=lambda *_: federation.way
    )
    federation.clock.sleep(59 * DAY)
    assert due() is None
    federation.clock.sleep(2 * DAY)
    assert due() is not None
    assert due() is None


def test_expired_certificate_is_not_renewed(federation: Federation):
    """The site needs an invitation, and the message says so."""
    site = federation.site("site-a")
    federation.clock.sleep(91 * DAY)
    with pytest.raises(EnrolmentRefused, match="invitation"):
        site.renew()


def test_site_comes_back_after_its_certificate_has_expired(federation: Federation):
    """With an invitation and its own keys; other keys are not its own."""
    site = federation.site("site-a")
    before = roster.load(federation.aggregator / "roster.toml")
    federation.clock.sleep(91 * DAY)
    token = federation.invite("site-a")
    with pytest.raises(EnrolmentRefused, match="with different keys"):
        federation.enroll(token, "elsewhere")

    federation.enroll(token)

    assert roster.load(federation.aggregator / "roster.toml") == before
    assert len(federation.nodes.known) == 1
    site.renew()


@pytest.mark.slow
def test_certificates_of_one_site_have_a_limit(federation: Federation):
    """A site in a loop does not fill the aggregator's disk."""
    site = federation.site("site-a")
    for _ in range(15):
        site.renew()
    with pytest.raises(EnrolmentRefused, match="16 valid certificates"):
        site.renew()
    federation.clock.sleep(89 * DAY)
    with pytest.raises(EnrolmentRefused, match="16 valid certificates"):
        site.renew()


def _renewal(federation: Federation, site: str, **changes: Any) -> bytes:
    folder = federation.folder / site
    certificate = (folder / "site.pem").read_bytes()
    parts: dict[str, Any] = {
        "made_at": federation.clock.now(),
        "release": "1",
        "identity": identity.load(folder / "identity.pem"),
        "certificate": x509.load_pem_x509_certificate(certificate).public_bytes(
            certificates.serialization.Encoding.PEM  # type: ignore[attr-defined]
        ),
        "certificate_key": certificates.load_key(folder / "site.pem"),
        "key": new_key(),
        **changes,
    }
    return enrolment.request_renewal(changes.get("site", site), **parts)


def test_renewal_by_another_is_refused(federation: Federation):
    """Certificate, its key and the identity must all be the site's."""
    federation.site("site-a")
    federation.site("site-b")
    other = federation.folder / "site-b"
    handle = federation.service().handle
    assert handle(_renewal(federation, "site-a"))[0] == 200
    for changes in (
        {"identity": identity.load(other / "identity.pem")},
        {"certificate_key": certificates.load_key(other / "site.pem")},
        {"certificate_key": new_key()},
        {
            "certificate": (other / "site.pem")
            .read_bytes()
            .partition(b"-----BEGIN P")[0]
        },
        {"certificate": (federation.aggregator / "ca.crt").read_bytes()},
        {"certificate": b"none"},
        {"made_at": federation.clock.now() - 601.0},
        {"made_at": federation.clock.now() + 601.0},
    ):
        assert handle(_renewal(federation, "site-a", **changes))[0] == 403, changes
    for body in (
        _spoiled(_renewal(federation, "site-a"), site="site-b"),
        _spoiled(_renewal(federation, "site-a"), made_at=1.0),
    ):
        assert handle(body)[0] == 403
    for made_at in ("NaN", "Infinity", -0.0):
        body = _spoiled(_renewal(federation, "site-a"), made_at=made_at)
        assert handle(body)[0] == 400


def test_replayed_renewal_is_refused_after_a_while(federation: Federation):
    """Clocks that differ by more than ten minutes are named as the reason."""
    federation.site("site-a")
    body = _renewal(federation, "site-a")
    federation.clock.sleep(601.0)
    status, answer = federation.service().handle(body)
    assert status == 403
    assert b"clocks" in answer


def test_newer_roster_needs_its_digest(federation: Federation):
    """Two people compare it; then, and only then, the site trusts it."""
    site = federation.site("site-a")
    before = roster.load(site.config.roster)
    federation.site("site-b")
    newer = site.renew().newer
    assert newer is not None
    assert roster.load(site.config.roster) == before
    (change,) = enrolment_roster.differences(before, newer)
    assert "adds site 'site-b'" in change

    digest = newer.digest.hex()
    for wrong in ("", digest[:31], "0" * 64, digest + "0"):
        with pytest.raises(RosterRefused, match="compare"):
            enrolment_roster.accept_roster(site.config, newer, wrong, at=0.0)
    enrolment_roster.accept_roster(site.config, newer, digest.upper()[:32], at=0.0)
    assert roster.load(site.config.roster) == newer
    with pytest.raises(StaleRoster):
        enrolment_roster.accept_roster(site.config, before, before.digest.hex(), at=0.0)


def test_roster_with_another_key_for_this_site_is_not_taken(federation: Federation):
    """Nor one with another aggregator, or without this site."""
    site = federation.site("site-a")
    before = roster.load(site.config.roster)
    other = identity.generate(lambda n: b"z" * n).public.key
    entry = before.sites[0]
    for changes, words in (
        ({"sites": (replace(entry, public_key=other),)}, "another key for this"),
        ({"sites": (replace(entry, site="site-b"),)}, "removed"),
        ({"aggregator_key": other}, "aggregator's own key"),
    ):
        made = replace(before, serial=before.serial + 1, **changes)
        with pytest.raises(RosterRefused, match=words):
            enrolment_roster.accept_roster(site.config, made, made.digest.hex(), at=0.0)
    assert roster.load(site.config.roster) == before


def test_operator_is_asked_who_has_a_name_whose_key_changes(federation: Federation):
    """Sums of before count for the name, whoever has it."""
    before = roster.load(federation.site("site-a").config.roster)
    other = replace(
        before.sites[0], public_key=identity.generate(lambda n: b"z" * n).public.key
    )
    (change,) = enrolment_roster.differences(before, replace(before, sites=(other,)))
    assert change.startswith("changes site 'site-a' of ")
    assert change.endswith(
        ": accept it only for the same party with the same data; others need a new name"
    )


def test_answer_that_is_not_ours_is_refused(federation: Federation):
    """A certificate of another key, or of another authority, is not written."""
    token = federation.invite("site-a")
    service = federation.way.service

    class Wrong:
        def __init__(self, issued: bytes) -> None:
            self.issued = issued

        def authority(self, _: str) -> bytes:
            return service.authority()[1]

        def post(self, body: bytes) -> bytes:
            found = json.loads(federation.way.post(body))
            return json.dumps({**found, "certificate": self.issued.decode()}).encode()

    request = signing_request("site-a", new_key())
    ours = Authority.load(federation.aggregator, clock=federation.clock)
    others = Authority.create("test", clock=federation.clock)
    for issued in (
        ours.issue_site("site-a", request),
        others.issue_site("site-a", request),
        b"",
        ours.pem,
    ):
        wrong = Wrong(issued)
        with pytest.raises(EnrolmentRefused, match="aggregator sent"):
            enrolment_site.enroll(
                token,
                federation.folder / "site-a",
                organisation="site-a",
                clock=federation.clock,
                connect=lambda *_, wrong=wrong: wrong,
            )
    assert not (federation.folder / "site-a" / "site.pem").exists()


def test_overview_lists_everybody(federation: Federation):
    """With fingerprints, and the digest that sites compare."""
    site = federation.site("site-a")
    federation.site("site-b")
    federation.invite("site-c")
    federation.revoke("site-b")

    found = enrolment_operator.overview(federation.config, clock=federation.clock)

    assert [(row.state, row.site) for row in found.sites] == [
        ("invited", "site-c"),
        ("enrolled", "site-a"),
        ("revoked", "site-b"),
    ]
    own = identity.load(site.config.identity).public.fingerprint
    assert found.sites[1].fingerprint == own
    newest = roster.load(federation.aggregator / "roster.toml")
    assert found.digest == newest.digest.hex()
    assert {row.connected for row in found.sites} == {None}
    (member,) = BookFile(folder=federation.aggregator).read().members
    for nodes, expected in (({int(member.node_id)}, True), ((), False)):
        found = enrolment_operator.overview(
            federation.config, clock=federation.clock, nodes=nodes
        )
        assert [row.connected for row in found.sites] == [None, expected, None]


def test_overview_reads_the_roster_as_often_for_many_sites_as_for_one(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
):
    """Reading it checks every site: once for each of 1,000 took minutes."""
    reads = list[Path]()
    read = roster_file._read_document

    def noted(path: Path) -> dict[str, Any]:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(roster_file, "_read_document", noted)
    counts = []
    for name in ("site-a", "site-b", "site-c"):
        federation.site(name)
        reads.clear()
        enrolment_operator.overview(federation.config, clock=federation.clock)
        counts.append(len(reads))
    assert len(set(counts)) == 1


def test_folder_that_is_no_aggregators(tmp_path: Path, federation: Federation):
    """The command that makes one is named."""
    config = replace(federation.config, folder=tmp_path)
    with pytest.raises(KeyFileRefused, match="aggregator init"):
        enrolment_operator.invite(
            config, "site-a", random_bytes=bytes, clock=federation.clock
        )


def test_invitation_before_the_aggregator_is_pinned(federation: Federation):
    """Or the roster that the site gets would name no aggregator."""
    (federation.aggregator / "roster.toml").unlink()
    with pytest.raises(RosterRefused, match="keys trust"):
        federation.invite("site-a")


def test_bad_names_are_refused_where_they_are_typed(federation: Federation):
    """Nobody finds out at the site."""
    for site in ("Site A", "", "a" * 65, "../a"):
        with pytest.raises(FederationError, match="not a name"):
            federation.invite(site)
