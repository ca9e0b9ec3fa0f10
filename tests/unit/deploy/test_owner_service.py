"""Owners at an aggregator elsewhere: what a token opens, and what it does not."""

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support import event_samples
from support.enrolments import Federation
from support.small_jobs import small_job

from deploy import audit_log
from deploy.aggregator_host import enrolment_http, owners, run_queue
from deploy.aggregator_host.owner_service import MAX_OPEN_RUNS, OwnerService, check_job
from deploy.aggregator_host.owners import Owner, Usage
from deploy.cli import commands as cli, remote_runs
from deploy.site_host import enrolment_connection
from federation.clock import SystemClock
from federation.errors import JobError
from federation.event_log import to_line
from federation.job import job_file
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from privacy.membership.messages import read_refusal
from privacy.membership.token import EnrolmentRefused, Token

FUNCTIONS = ("clients.models:*",)


@dataclass
class Office:
    """An aggregator with owners, reached as through its proxy."""

    federation: Federation
    service: OwnerService
    tokens: dict[str, Token]

    def ask(self, owner: str, action: str, **about: Any) -> tuple[int, Any]:
        return self.send(
            {"secret": self.tokens[owner].secret.hex(), "action": action, **about}
        )

    def send(self, asked: Any) -> tuple[int, Any]:
        status, body = self.service.handle(json.dumps(asked).encode())
        return int(status), json.loads(body)

    def submit(self, owner: str, job: JobSpec | None = None, priority: int = 0) -> str:
        text = tomli_w.dumps(job_file.document(job or plain()))
        status, answer = self.ask(owner, "submit", job=text, priority=priority)
        assert status == 200, answer
        return str(answer["run"])

    def refused(self, owner: str, action: str, **about: Any) -> str:
        status, answer = self.ask(owner, action, **about)
        assert status == 400
        return str(answer["refused"])


def plain(**changes: Any) -> JobSpec:
    return small_job(num_sites=2, **changes)


def added(office: Federation, name: str, **about: Any) -> Token:
    token = Token(address="h:1", authority="ab" * 32, site=name, secret=os.urandom(32))
    made = Owner(name=name, token=token.digest, **about)
    owners.change(office.aggregator, name, lambda _: made)
    return token


@pytest.fixture
def office(tmp_path: Path) -> Office:
    made = Federation(folder=tmp_path, clock=SystemClock())
    for name in ("site-0", "site-1"):
        made.site(name)
    tokens = {name: added(made, name) for name in ("ann", "bob")}
    service = OwnerService(
        config=made.config, clock=made.clock, listener=made.said.append
    )
    return Office(made, service, tokens)


def test_an_owner_sees_and_stops_its_own_runs_alone(office: Office):
    mine, other = office.submit("ann"), office.submit("bob")
    status, rows = office.ask("ann", "runs")
    assert (status, [row["run"] for row in rows]) == (200, [mine])
    nobody = office.refused("ann", "stop", run="20260102-030405-abcdef")
    for action in ("stop", "events"):
        told = office.refused("ann", action, run=other, offset=0)
        assert told == nobody.replace("20260102-030405-abcdef", other)
    (run,) = office.service.config.runs.glob(f"*/{other}")
    assert not (run / run_queue.STOP).exists()
    assert office.ask("bob", "stop", run=other)[0] == 200
    assert (run / run_queue.STOP).exists()


def test_what_a_run_waits_for_names_no_run_of_others(office: Office):
    first, waiting = office.submit("bob"), office.submit("ann")
    behind = office.submit("ann")
    _, (row, last) = office.ask("ann", "runs")
    assert (row["run"], last["run"]) == (waiting, behind)
    for text in (row["waits"], last["waits"]):
        assert "a slot at site-0, site-1" in text
        assert first not in text
    _, found = office.ask("ann", "events", run=waiting, offset=0)
    assert found["waits"] == row["waits"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 60_000,
        b'{"secret": 5, "action": "runs"}',
        b'{"secret": "zz", "action": "submit"}',
        b'{"secret": "", "action": "runs"}',
        b'{"action": "stop", "run": "one"}',
        json.dumps({"secret": "ab" * 32, "action": "runs"}).encode(),
        json.dumps({"secret": " " * 64, "action": "runs"}).encode(),
    ],
)
def test_whoever_has_no_token_learns_nothing(office: Office, body: bytes):
    """The same answer for every request, also of an owner who was revoked."""
    office.submit("ann")
    expected = office.service.handle(b'{"secret": "00", "action": "nothing"}')
    assert expected[0] == 403
    assert office.service.handle(body) == expected
    known = owners.read(office.federation.aggregator).find("ann")
    assert known is not None
    gone = replace(known, token="")
    owners.change(office.federation.aggregator, "ann", lambda _: gone)
    for action in ("runs", "submit", "events", "stop", "other"):
        secret = office.tokens["ann"].secret.hex()
        asked = {"secret": secret, "action": action, "run": "one"}
        assert office.service.handle(json.dumps(asked).encode()) == expected


def test_tokens_are_kept_as_hashes(office: Office):
    text = (office.federation.aggregator / owners.FILE).read_text()
    for token in office.tokens.values():
        assert token.secret.hex() not in text
        assert token.text not in text
        assert token.digest in text


def test_events_come_in_whole_lines_from_an_offset_on(office: Office):
    name = office.submit("ann")
    (path,) = office.service.config.runs.glob(f"*/{name}")
    lines = [f"{to_line(event)}\n" for event in event_samples.two_sites(2)]
    (path / "events.jsonl").write_text("".join(lines) + '{"torn')
    _, found = office.ask("ann", "events", run=name, offset=0)
    assert found["lines"] == "".join(lines)
    assert found["offset"] == len("".join(lines).encode())
    _, later = office.ask("ann", "events", run=name, offset=found["offset"])
    assert (later["lines"], later["offset"]) == ("", found["offset"])
    _, part = office.ask("ann", "events", run=name, offset=len(lines[0]))
    assert part["lines"] == "".join(lines[1:])
    for offset in (-1, "0", True, None):
        assert "offset" in office.refused("ann", "events", run=name, offset=offset)
    run_queue.leave_outcome(RunFolder(path), run_queue.Outcome(code=1, message="why"))
    _, ended = office.ask("ann", "events", run=name, offset=found["offset"])
    assert (ended["code"], ended["message"], ended["status"]) == (1, "why", "failed")


def test_limits_of_an_owner_hold_for_its_token(
    office: Office, monkeypatch: pytest.MonkeyPatch
):
    text = tomli_w.dumps(job_file.document(plain()))
    told = office.refused("ann", "submit", job=text, priority=1)
    assert "may ask for priority 0 alone" in told
    for job, priority in ((5, 0), (text, True), (text, "1")):
        assert "text of a job" in office.refused(
            "ann", "submit", job=job, priority=priority
        )
    assert office.refused("ann", "submit", job="name = 3", priority=0)
    known = office.tokens["bob"]
    poor = Owner(name="bob", token=known.digest, quota=Usage(site_hours=0.0))
    owners.change(office.federation.aggregator, "bob", lambda _: poor)
    assert "quota site_hours" in office.refused("bob", "submit", job=text, priority=0)
    monkeypatch.setattr("deploy.aggregator_host.owner_service.MAX_OPEN_RUNS", 2)
    assert MAX_OPEN_RUNS > 2
    for _ in range(2):
        office.submit("ann")
    assert "2 of your runs" in office.refused("ann", "submit", job=text, priority=0)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"factory": "os:system"}}, "model.factory"),
        ({"model": {"factory": "subprocess:run"}}, "model.factory"),
        ({"model": {"factory": "clients.models:torch"}}, "model.factory"),
        ({"aggregation": {"combine": "os:system"}}, "aggregation.combine"),
        ({"storage": {"url": "s3://another/bucket"}}, "storage"),
        ({"storage": {"url": "file:///etc"}}, "storage"),
        ({"options": {"folder": "/etc"}}, "model.options.folder"),
        ({"options": {"folder": "../ca.key"}}, "model.options.folder"),
        ({"options": {"folder": "runs/other"}}, "model.options.folder"),
        ({"options": {"folder": "~root"}}, "model.options.folder"),
        ({"options": {"x": [{"y": "https://h"}]}}, "model.options.x[0].y"),
        ({"options": {"f": "os:system"}}, "model.options.f"),
    ],
)
def test_a_job_of_an_owner_reaches_nothing_at_the_aggregator(
    changes: Mapping[str, Any], key: str
):
    """Its coordinator would call functions, read files and write to buckets there."""
    document = job_file.document(plain())
    for table, values in changes.items():
        place = document["model"] if table == "options" else document
        place[table] = {**place.get(table, {}), **values}
    with pytest.raises(JobError) as refused:
        check_job(job_file.parse(document), FUNCTIONS)
    assert refused.value.key == key
    check_job(plain(), FUNCTIONS)


def test_a_job_of_an_owner_begins_with_no_file_of_the_aggregator():
    job = plain()
    weights = "runs/small/one/model.safetensors"
    named = replace(job, model=replace(job.model, weights=weights))
    with pytest.raises(JobError) as refused:
        check_job(named, FUNCTIONS)
    assert refused.value.key == "model.weights"


class Direct(enrolment_connection.Aggregator):
    """The way to a service in this process."""

    service: OwnerService

    def authority(self, fingerprint: str) -> bytes:
        assert fingerprint == "ab" * 32
        return b"root"

    def post(self, body: bytes) -> bytes:
        status, answer = self.service.handle(body)
        if status != 200:
            raise EnrolmentRefused(read_refusal(answer))
        return answer


def test_verbs_work_elsewhere_with_a_token(
    office: Office,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """From a private file or the environment, and never the command line."""
    monkeypatch.setattr(enrolment_connection, "Aggregator", Direct)
    monkeypatch.setattr(Direct, "service", office.service, raising=False)
    job, file = tmp_path / "job.toml", tmp_path / "token"
    job.write_text(tomli_w.dumps(job_file.document(plain())))
    at = ["--aggregator", "https://fed.example.org:8443"]
    assert cli.main(["ps", *at]) == 2
    assert remote_runs.TOKEN_FILE in capsys.readouterr().err
    file.write_text(office.tokens["ann"].text)
    file.chmod(0o644)
    monkeypatch.setenv(remote_runs.TOKEN_FILE, str(file))
    assert cli.main(["ps", *at]) == 1
    assert str(file) in capsys.readouterr().err
    file.chmod(0o600)
    assert cli.main(["run", str(job), *at, "--detach", "--owner", "bob"]) == 2
    assert "--owner" in capsys.readouterr().err
    assert cli.main(["run", str(job), *at, "--detach", "--owner", "ann"]) == 0
    name = capsys.readouterr().out.strip()
    office.submit("bob")
    assert cli.main(["ps", *at, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["owner"], row["status"]) == (name, "ann", "waiting")
    (path,) = office.service.config.runs.glob(f"*/{name}")
    lines = [to_line(event) for event in event_samples.two_sites(2)]
    (path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert cli.main(["logs", name, *at, "--json"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    (path / "events.jsonl").write_bytes(b"\n\xff".join(map(str.encode, lines)) + b"\n")
    assert cli.main(["logs", name, *at, "--json"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err.count("line 2: ")) == (f"{lines[0]}\n", 1)
    assert cli.main(["stop", name, *at]) == 0
    assert (path / run_queue.STOP).exists()
    run_queue.leave_outcome(
        RunFolder(path), run_queue.Outcome(code=130, message="stopped")
    )
    assert cli.main(["watch", name, *at]) == 130
    assert f"run {name} stopped" in capsys.readouterr().out
    monkeypatch.setenv(remote_runs.TOKEN, office.tokens["bob"].text)
    assert cli.main(["stop", name, *at]) == 1
    assert f"no run {name!r}" in capsys.readouterr().err


def test_operators_verbs_make_list_and_revoke_owners(
    office: Office,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A token is shown once: for a new owner, or after it was revoked."""
    folder = office.federation.aggregator
    text = 'listen = "127.0.0.1:8443"\nhosts = ["127.0.0.1"]\n'
    (folder / "aggregator.toml").write_text(text)
    monkeypatch.chdir(folder)
    verb = ["aggregator", "owners"]
    quotas = ["--quota", "site_hours=10", "--quota", "epsilon=4"]
    assert cli.main([*verb, "add", "cyd", "--weight", "2", *quotas]) == 0
    token = Token.parse(capsys.readouterr().out)
    found = owners.read(folder).of_secret(token.secret)
    assert found is not None
    assert (found.name, found.weight, found.max_priority) == ("cyd", 2.0, 0)
    assert found.quota == Usage(site_hours=10.0, epsilon=4.0)
    noted = audit_log.read(folder / audit_log.FILE).entries[-1].details
    assert noted == {"weight": "2.0", "quota": "site_hours=10, epsilon=4"}
    assert cli.main([*verb, "add", "cyd", "--max-priority", "3"]) == 0
    assert capsys.readouterr().out == ""
    changed = owners.read(folder).of_secret(token.secret)
    assert changed == replace(found, max_priority=3)
    assert cli.main([*verb, "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["owner"], row["token"]) for row in rows][-1] == ("cyd", "valid")
    assert cli.main([*verb, "list"]) == 0
    assert "0 of 10" in capsys.readouterr().out
    assert cli.main([*verb, "revoke", "cyd"]) == 0
    assert owners.read(folder).of_secret(token.secret) is None
    assert cli.main([*verb, "revoke", "nobody"]) == 2
    capsys.readouterr()
    assert cli.main([*verb, "add", "cyd"]) == 0
    assert Token.parse(capsys.readouterr().out).secret != token.secret
    done = audit_log.read(folder / audit_log.FILE).entries
    assert [(e.action, e.subject) for e in done if e.subject == "cyd"] == [
        *[("owner.add", "cyd")] * 2,
        ("owner.revoke", "cyd"),
        ("owner.add", "cyd"),
    ]
    for wrong in (
        ["operator"],
        ["dan", "--weight", "0"],
        ["dan", "--max-priority", "1000"],
        ["dan", "--quota", "euros=5"],
        ["dan", "--quota", "dollars=0"],
        ["dan", "--quota", "epsilon=-1"],
        ["dan", "--quota", "epsilon=nan"],
    ):
        assert cli.main([*verb, "add", *wrong]) == 2, wrong
    capsys.readouterr()
    assert cli.main([*verb, "add", "bob<b>"]) == 2
    told = capsys.readouterr().err
    assert "name: 'bob<b>'" in told
    assert "site" not in told


def test_settings_of_an_owner_change_alone(
    office: Office,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A larger quota drops no other one, and makes no token for a revoked owner."""
    folder = office.federation.aggregator
    text = 'listen = "127.0.0.1:8443"\nhosts = ["127.0.0.1"]\n'
    (folder / "aggregator.toml").write_text(text)
    monkeypatch.chdir(folder)
    verb = ["aggregator", "owners"]
    quotas = ["--quota", "site_hours=0.5", "--quota", "epsilon=8"]
    assert cli.main([*verb, "add", "cyd", *quotas]) == 0

    def quota_after(*settings: str) -> Usage:
        assert cli.main([*verb, "add", "cyd", *settings]) == 0
        owner = owners.read(folder).find("cyd")
        assert owner is not None
        return owner.quota

    raised = quota_after("--quota", "site_hours=0.7")
    assert raised == Usage(site_hours=0.7, epsilon=8.0)
    assert quota_after("--weight", "3") == raised
    assert quota_after("--quota", "epsilon=none") == Usage(site_hours=0.7)
    noted = audit_log.read(folder / audit_log.FILE).entries[-1].details
    assert noted == {"quota": "epsilon=none"}
    assert cli.main([*verb, "revoke", "cyd"]) == 0
    capsys.readouterr()
    assert quota_after("--quota", "site_hours=1") == Usage(site_hours=1.0)
    told = capsys.readouterr()
    assert (told.out, told.err.count("stays revoked")) == ("", 1)
    assert quota_after() == Usage(site_hours=1.0)
    token = Token.parse(capsys.readouterr().out)
    assert owners.read(folder).of_secret(token.secret) is not None


def test_the_service_answers_at_its_path(office: Office):
    handlers = {"POST /owner": office.service.handle}
    with enrolment_http.serve(handlers) as port:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
        secret = office.tokens["ann"].secret.hex()
        body = json.dumps({"secret": secret, "action": "runs"})
        line.request("POST", "/owner", body)
        answer = line.getresponse()
        assert (answer.status, answer.read()) == (200, b"[]")
        line.close()
