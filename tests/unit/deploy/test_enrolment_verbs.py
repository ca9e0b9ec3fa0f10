"""``crossfed enroll`` and the operator's verbs: what they print and refuse."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import event_samples
from support.enrolments import Federation
from support.event_samples import Script

from deploy.aggregator_host import run_list
from deploy.aggregator_host.enrolment_book import BookFile
from deploy.cli import commands as cli, enrolment_verbs
from federation.clock import SystemClock
from federation.event_log import EventWriter
from federation.events import SiteAnswered
from monitoring.runs.run_folder import RunFolder
from privacy.membership.token import Token

INVITE = ["aggregator", "invite", "site-a"]
ROLE = "arn:aws:iam::123456789012:role/service/crossfed-site"
EMAIL = "site@p-1.iam.gserviceaccount.com"
OPEN = f"crossfed-id-1.127.0.0.1:1.{'ab' * 32}.site-a"


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    made = Federation(folder=tmp_path, clock=SystemClock())
    text = 'listen = "127.0.0.1:8443"\nhosts = ["127.0.0.1"]\n'
    (made.aggregator / "aggregator.toml").write_text(text)
    monkeypatch.chdir(made.aggregator)
    monkeypatch.delenv("AWS_REGION", raising=False)
    return made


def test_invitation_is_the_only_line_of_output(
    federation: Federation, capsys: pytest.CaptureFixture[str]
):
    """So that it can be piped; what to do with it is on standard error."""
    assert cli.main(["aggregator", "invite", "site-a"]) == 0
    out, err = capsys.readouterr()
    token = Token.parse(out)
    assert (token.site, token.address) == ("site-a", "127.0.0.1:8443")
    assert "crossfed enroll" in err
    assert token.text not in err


def test_invitation_for_another_address(
    federation: Federation, capsys: pytest.CaptureFixture[str]
):
    """The aggregator is behind a router, or has several names."""
    options = ["--address", "fed.example.org:443", "--minutes", "5", "--json"]
    assert cli.main(["aggregator", "invite", "site-a", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert Token.parse(facts["token"]).address == "fed.example.org:443"


def test_result_of_enroll_is_json_where_it_is_asked_for(
    federation: Federation, capsys: pytest.CaptureFixture[str]
):
    parsed = cli._parser().parse_args(["enroll", "-", "--json"])
    enrolment_verbs._print_enrolled(
        federation.enroll(federation.invite("site-a")), parsed
    )
    facts = json.loads(capsys.readouterr().out)
    assert (facts["site"], len(facts["digest"])) == ("site-a", 64)


def test_site_without_a_run_has_a_status(
    federation: Federation, capsys: pytest.CaptureFixture[str]
):
    federation.enroll(federation.invite("site-a"))
    config = str(federation.folder / "site-a" / "site.toml")
    assert cli.main(["site", "status", "--config", config, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["site"], facts["is_up"], facts["runs"]) == ("site-a", False, [])
    days = (facts["certificate_ends"] - SystemClock().now()) / 86_400
    assert 1 < days < 1000
    assert cli.main(["site", "status", "--config", config]) == 0
    assert "no agent runs" in capsys.readouterr().out


def test_enrolled_site_reads_what_comes_next(
    federation: Federation, capsys: pytest.CaptureFixture[str]
):
    """Its roster is not that of the run if others enrol after it."""
    enrolled = federation.enroll(federation.invite("site-a"))
    parsed = cli._parser().parse_args(["enroll", "-"])
    enrolment_verbs._print_enrolled(enrolled, parsed)
    out = capsys.readouterr().out
    roster = out.index(f"crossfed enroll --folder {enrolled.folder} --roster")
    assert roster < out.index(f"crossfed site up --config {enrolled.folder}")


@pytest.mark.parametrize(
    ("options", "machine"),
    [
        (
            ["--aws-role", ROLE, "--region", "us-east-1", "--instance", "i-0a1b2c3d4e"],
            "aws 123456789012 crossfed-site i-0a1b2c3d4e",
        ),
        (["--gcp-service-account", EMAIL, "--project", "p-1"], f"gcp p-1 {EMAIL}"),
    ],
)
def test_invitation_of_a_machine_is_no_secret(
    federation: Federation,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    machine: str,
):
    """It says where to enrol; who may is in the book."""
    assert cli.main([*INVITE, *options]) == 0
    out, err = capsys.readouterr()
    assert Token.parse(out).secret == b""
    assert f"for the machine {machine} as site-a" in err
    assert f"--platform {machine[:3]}" in err
    (bound,) = BookFile(folder=federation.aggregator).read().bound
    assert str(bound.machine) == machine
    assert cli.main(["aggregator", "sites"]) == 0
    assert "invited   site site-a" in capsys.readouterr().out


@pytest.mark.parametrize("hides", [{}, {"secure": True}, {"epsilon_cap": 8.0}])
def test_operator_reads_when_a_site_answered_and_how_fast_it_trains(
    federation: Federation, capsys: pytest.CaptureFixture[str], hides: dict[str, Any]
):
    """As far as the newest run lets it be known; on the page, too."""
    federation.site("site-a")
    federation.site("site-b")
    for name, privacy in (("20260101-000000-a", {}), ("20260102-000000-b", hides)):
        run = RunFolder(federation.config.runs / "job" / name)
        script = Script(sites=("site-a",), start=federation.clock.now(), **privacy)
        with EventWriter(run.events) as log:
            for event in event_samples.run(script):
                log(event)
    answers = [e for e in event_samples.run(script) if isinstance(e, SiteAnswered)]
    steps = sum(answer.num_steps or 0 for answer in answers)
    trained = sum(p.seconds for e in answers for p in e.phases if p.name == "train")
    speed = None if hides else pytest.approx(steps / trained)
    assert cli.main(["aggregator", "sites", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["sites"]
    page = run_list.of_aggregator(federation.config, federation.clock).sites()
    for rows in (facts, page):
        found = {row["site"]: row for row in rows}
        assert found["site-a"]["last_answer"] == answers[-1].at
        assert found["site-a"]["steps_per_second"] == speed
        assert found["site-b"]["last_answer"] is None
    assert cli.main(["aggregator", "sites"]) == 0
    text = capsys.readouterr().out
    assert ("ago, - steps a second" in text) == bool(hides)
    assert text.count("no answer in") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["aggregator", "invite", "Site A"], 2, "not a name"),
        (["aggregator", "invite", "a", "--address", "nowhere"], 2, "HOST:PORT"),
        (["aggregator", "invite", "a", "--config", "none.toml"], 2, "none.toml"),
        (["aggregator", "revoke", "site-z"], 1, "enrolled: none"),
        ([*INVITE, "--aws-role", "x", "--region", "us-east-1"], 2, "--aws-role"),
        ([*INVITE, "--aws-role", ROLE], 2, "not a region"),
        ([*INVITE, "--aws-role", ROLE, "--region", "evil.example"], 2, "not a region"),
        ([*INVITE, "--gcp-service-account", "a@b.c", "--project", "p"], 2, "account"),
        ([*INVITE, "--gcp-service-account", EMAIL, "--project", ""], 2, "project"),
        ([*INVITE, "--gcp-service-account", EMAIL, "--aws-role", ROLE], 2, "excludes"),
        (["enroll", OPEN], 1, "needs --platform"),
        (["enroll", OPEN, "--platform", "aws"], 2, "--region"),
        (["enroll", "crossfed-1.half"], 1, "copy all of"),
        (["enroll", "--renew", "--folder", "none"], 2, "site.toml"),
        (["enroll", "--roster", "--folder", "none"], 2, "site.toml"),
        (["enroll", "--renew", "--accept", "ab"], 2, "--roster"),
    ],
)
def test_mistake_is_explained(
    federation: Federation,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
):
    """Without a traceback, and with the exit code of its kind."""
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in out + err


def test_token_with_a_secret_is_no_argument(
    federation: Federation, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Every user of a machine can read arguments, and enrol first."""
    token = federation.invite("site-a")
    assert cli.main(["enroll", token.text, "--folder", str(tmp_path / "site")]) == 1
    told = capsys.readouterr().err
    assert "has a secret" in told
    assert "aggregator revoke" in told
    assert token.text not in told
    assert not (tmp_path / "site").exists()


@pytest.mark.slow
def test_token_is_asked_for_without_echo(tmp_path: Path):
    """At a terminal: what is typed is not on the screen."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-I", "-m", "crossfed", "enroll"]
    with subprocess.Popen(
        [*command, "--folder", str(tmp_path / "site")],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        shown = b""
        while b"token: " not in shown:
            shown += os.read(controller, 1024)
        os.write(controller, b"crossfed-1.half\n")
        with contextlib.suppress(OSError):  # The terminal is closed at its end.
            while more := os.read(controller, 1024):
                shown += more
        assert process.wait() == 1
    os.close(controller)
    assert b"is no token" in shown
    assert b"crossfed-1.half" not in shown


@pytest.mark.parametrize("given", ["crossfed-1.half\n", "", "\n", "x" * 100_000 + "\n"])
def test_token_comes_from_standard_input(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        assert cli.main(["enroll", *arguments]) == 1
        assert "copy all of" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "10081", "an hour", "9" * 9999])
def test_token_holds_for_a_sensible_time(
    federation: Federation, capsys: pytest.CaptureFixture[str], minutes: str
):
    """One that holds for ever is a password."""
    with pytest.raises(SystemExit) as end:
        cli.main(["aggregator", "invite", "a", "--minutes", minutes])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "--minutes: a token holds 1 to 10080 minutes (7 days)" in told


def test_token_or_renewal_and_not_both(federation: Federation):
    """One of them at most; without any, the command asks for a token."""
    for arguments in (["token", "--renew"], ["--renew", "--roster"]):
        with pytest.raises(SystemExit):
            cli.main(["enroll", *arguments])


def test_list_of_sites(federation: Federation, capsys: pytest.CaptureFixture[str]):
    """Invited, enrolled and revoked, and the digest that sites compare."""
    federation.site("site-a")
    federation.site("site-b")
    federation.revoke("site-b")
    federation.invite("site-c")

    assert cli.main(["aggregator", "sites"]) == 0
    text = capsys.readouterr().out
    for words in (
        "enrolled  site site-a",
        "revoked   site site-b",
        "invited   site site-c",
    ):
        assert words in text
    assert cli.main(["aggregator", "sites", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["digest"] in text
    assert [row["state"] for row in facts["sites"]] == [
        *("invited", "enrolled", "revoked")
    ]
