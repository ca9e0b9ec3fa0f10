"""The log of who did what: what shows in it, and what happens when it is full."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from support import agents
from support.enrolments import Federation
from support.small_jobs import small_job

from deploy import audit_log
from deploy.aggregator_host import parties, run_list, run_queue
from deploy.cli import commands as cli
from deploy.site_host import config as site_file, enrolment_roster
from federation.errors import CorruptObject, RunConflict, StoreUnavailable

ACTIONS = ("site.invite", "site.enrol", "run.submit", "run.stop", "site.revoke")


def written(folder: Path) -> tuple[Path, list[bytes]]:
    for index, action in enumerate(ACTIONS):
        audit_log.note(folder, action, "one", at=float(index), who="ann", text="a\nb")
    path = folder / audit_log.FILE
    return path, path.read_bytes().splitlines(keepends=True)


def faults(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"".join(lines))
    return "; ".join(audit_log.read(path).faults)


def test_every_change_of_a_line_is_named(tmp_path: Path):
    """A line changed, taken out, moved, repeated or put in."""
    path, lines = written(tmp_path)
    assert audit_log.read(path).faults == ()
    assert [entry.action for entry in audit_log.read(path).entries] == [*ACTIONS]
    whole = b"".join(lines)
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        line = whole[:place].count(b"\n") + 1
        assert f"line {line}" in "; ".join(audit_log.read(path).faults), place
    for index in range(len(lines) - 1):
        number = index + 1
        gone = faults(path, lines[:index] + lines[number:])
        assert f"entry {number} is missing" in gone
        moved = [*lines]
        moved[index : index + 2] = lines[index + 1], lines[index]
        assert f"entry {number} comes after {number + 1}" in faults(path, moved)
        again = faults(path, [*lines[:number], lines[index], *lines[number:]])
        assert f"entry {number} comes after {number}" in again
        # With a digest of its own, but what follows does not know it.
        entry = audit_log._parse(lines[index].rstrip(b"\n"))
        forged = replace(entry, subject="other")
        line_ = audit_log._line(forged, audit_log._digest(forged))
        found = faults(path, [*lines[:index], line_, *lines[number:]])
        assert f"entry {number + 1} does not follow entry {number}" in found


def test_a_cut_end_is_found_with_a_digest_that_others_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """By a site's own log, without anything of the aggregator's."""
    path, lines = written(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    head = audit_log.head(tmp_path)
    told = {audit_log.HEAD: head}
    audit_log.note(site, "run.accept", "run-1", at=9.0, who="agent", **told)
    known = ["audit-log", str(path), "--known", str(site / audit_log.FILE)]
    assert cli.main(known) == 0
    out = capsys.readouterr().out
    assert "site.revoke" in out
    assert head in out
    path.write_bytes(b"".join(lines[:-1]))
    assert cli.main(["audit-log", str(path)]) == 0, "nothing in the file shows it"
    assert cli.main([*known, "--json"]) == 1
    shown, errors = capsys.readouterr()
    assert head in errors
    assert head in json.loads(shown[shown.index("{\n") :])["faults"][0]
    capsys.readouterr()
    assert cli.main(["audit-log", str(path), "--known", head]) == 1
    assert "not as" in capsys.readouterr().out.splitlines()[-1]


def test_a_torn_line_is_replaced_and_a_damaged_end_refused(tmp_path: Path):
    path, lines = written(tmp_path)
    path.write_bytes(b"".join(lines) + lines[0][:50])
    (fault,) = audit_log.read(path).faults
    assert "line 6 is torn" in fault
    assert "it was cut" in fault  # Which it is, cannot be known.
    audit_log.note(tmp_path, "run.stop", at=9.0)
    found = audit_log.read(path)
    assert found.faults == ()
    assert "50 bytes" in found.entries[-1].details["torn"]
    path.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b"one", b"two"))
    for action in (audit_log.head, lambda f: audit_log.note(f, "run.stop", at=9.0)):
        with pytest.raises(CorruptObject, match="evidence"):
            action(tmp_path)


def test_what_cannot_be_put_on_record_does_not_happen(tmp_path: Path):
    """Except a revocation, for which some of the disk is kept free."""
    federation = Federation(folder=tmp_path)
    federation.site("site-a")
    path = federation.aggregator / audit_log.FILE
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match=r"audit\.jsonl"):
            federation.invite("site-b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert b"site-b" not in (federation.aggregator / "sites.json").read_bytes()


def test_members_and_runs_are_on_record_at_both_ends(tmp_path: Path):
    federation = Federation(folder=tmp_path)
    site = federation.site("site-a")
    job = small_job(num_sites=1)
    federation.pin(job.sites[0].name, "ab" * 32)
    newer = site.renew().newer
    assert newer is not None
    enrolment_roster.accept_roster(site.config, newer, newer.digest.hex(), at=1.0)
    run = parties.submitted(
        job,
        federation.aggregator,
        federation.config.runs,
        at=1.0,
        random_bytes=lambda n: b"x" * n,
        owner="ann",
    )
    run_queue.ask_to_stop(run, at=2.0)
    page = run_list.of_aggregator(federation.config, federation.clock)
    page.actions["stop"](run)
    assert [row["run"] for row in page.queue()] == [run.path.name]
    with pytest.raises(RunConflict, match="has not ended"):
        page.actions["resume"](run)
    run_queue.leave_outcome(run, run_queue.Outcome(code=130, message=""))
    assert page.queue() == []
    run_queue.take_up(run, at=3.0)
    for code in (0, 130):
        (run.path / run_queue.OUTCOME).unlink(missing_ok=True)
        run_queue.leave_outcome(run, run_queue.Outcome(code=code, message=""))
        if not code:
            with pytest.raises(RunConflict, match="is completed"):
                page.actions["resume"](run)
    page.actions["resume"](run)
    (row,) = page.queue()
    assert "waits for its coordinator" in row["waits"]
    federation.revoke("site-a")
    path, key = federation.aggregator / "roster.toml", "cd" * 32
    words = ["--site", "site-z", "--organisation", "Z", "--key", key]
    assert cli.main(["keys", "trust", str(path), *words]) == 0
    here = audit_log.read(federation.aggregator / audit_log.FILE)
    assert here.faults == ()
    user = audit_log.operator()
    assert [(e.action, e.who) for e in here.entries] == [
        ("site.invite", user),
        ("site.enrol", "site site-a"),
        ("site.renew", "site site-a"),
        ("run.submit", f"{user} for owner ann"),
        ("run.stop", user),
        ("run.stop", f"the live page of {user}"),
        ("run.resume", user),
        ("run.resume", f"the live page of {user}"),
        ("site.revoke", user),
        ("roster.trust", user),
    ]
    assert here.entries[0].details["until"].endswith(" UTC")
    there = audit_log.read(site.config.folder / audit_log.FILE)
    assert [(e.action, e.subject) for e in there.entries] == [
        ("site.enrol", "site-a"),
        ("site.renew", "site-a"),
        ("roster.accept", str(newer.serial)),
    ]


def test_a_site_notes_settings_that_change_and_the_aggregators_digest(tmp_path: Path):
    """What is under ``policy`` with its values; of the rest, digests only."""
    members = agents.consortium("site-0", "site-1")
    agent = agents.agent(tmp_path, "site-0", members)
    job = small_job(num_sites=2)
    for index, head in enumerate(("ab" * 32, "cd" * 32)):
        made = agents.proposal(job, run_id=f"run-{index}", audit_head=head)
        assert not agents.propose(agent, members, made).refused
        path = agent.config.path
        if not index:
            path.write_text(path.read_text() + "\n[data]\nname = 'others'\n", "utf-8")
    agent.close()
    found = audit_log.read(tmp_path / "site-0" / audit_log.FILE).entries
    assert audit_log.heads(found) == ["ab" * 32, "cd" * 32]
    first, second = (entry for entry in found if entry.action == "settings")
    assert second.subject == "changed: data.name"
    assert "others" not in str(second)
    assert first.details["policy.secure_aggregation"] == "false"
    assert [entry.action for entry in found][-2:] == ["run.end"] * 2
    assert "did not start" in found[-1].details["run"]
    assert site_file.load(agent.config.path).file.data.name == "others"
