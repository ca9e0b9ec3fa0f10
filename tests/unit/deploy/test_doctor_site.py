"""Whether a site is ready: what is said of what is wrong."""

import os
from pathlib import Path

import pytest
from support.enrolments import Federation

from deploy.doctor import site as doctor_site
from deploy.doctor.checks import Check
from privacy.membership import key_files as keys

DAY = 86400.0


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made = Federation(folder=tmp_path)
    made.site("site-a")
    return made


def examined(federation: Federation) -> dict[str, Check]:
    path = federation.folder / "site-a" / "site.toml"
    return {each.name: each for each in doctor_site.checks(path, federation.clock)}


def test_enrolled_site_lacks_nothing_but_the_way(federation: Federation):
    """Nobody listens here: the one problem says so."""
    pytest.importorskip("flwr")
    found = examined(federation)
    wrong = [each for each in found.values() if each.status == "problem"]
    assert [each.name for each in wrong] == ["aggregator"]
    assert "cannot be reached" in wrong[0].found
    assert found["certificate"].found.endswith("is valid for 90 days")
    assert found["trust"].found == "the key is that of site 'site-a'"


@pytest.mark.parametrize(
    ("days", "status", "text"),
    [(80, "warning", "expires in 10 days"), (91, "problem", "expired 1 days ago")],
)
def test_certificate_that_ends(
    federation: Federation, days: int, status: str, text: str
):
    """Before and after it has."""
    federation.clock.sleep(days * DAY)
    found = examined(federation)["certificate"]
    assert found.status == status
    assert text in found.found
    assert "enroll --renew" in found.advice


def test_open_and_missing_keys_are_problems(federation: Federation):
    """Each file is named."""
    folder = federation.folder / "site-a"
    (folder / "site.pem").chmod(0o644)
    os.unlink(folder / "node.pem")  # noqa: PTH108 -- as an operator would
    found = examined(federation)
    assert found["certificate"].status == found["node key"].status == "problem"
    assert "site.pem has mode 0644" in found["certificate"].found
    assert "node.pem" in found["node key"].found


@pytest.mark.parametrize("name", ["ca.crt", "site.pem"])
def test_file_without_a_certificate_is_no_outage(federation: Federation, name: str):
    """It is named, and nobody looks for a firewall."""
    (federation.folder / "site-a" / name).write_text("nothing")
    found = examined(federation)["aggregator"]
    assert (found.status, found.advice) == ("problem", "enrol this site again")
    assert "holds no certificate" in found.found


def test_identity_is_held_against_what_the_agent_takes(federation: Federation):
    """It refuses a key that is open to others, or that needs a passphrase."""
    path = federation.folder / "site-a" / "identity.pem"
    assert examined(federation)["key"].status == "ok"
    path.chmod(0o640)
    found = examined(federation)["key"]
    assert (found.status, "0640" in found.found) == ("problem", True)
    path.unlink()
    words = federation.folder / "words"
    words.write_text("secret\n")
    words.chmod(0o600)
    keys.new("site-a", random_bytes=os.urandom, out=path, passphrase_file=words)
    found = examined(federation)["key"]
    assert found.status == "problem"
    assert found.advice.startswith("enrol this site again")


def test_key_that_the_roster_does_not_pin(federation: Federation):
    """As after a restored folder."""
    federation.site("site-b")
    other = federation.folder / "site-b" / "identity.pem"
    mine = federation.folder / "site-a" / "identity.pem"
    mine.write_bytes(other.read_bytes())
    assert examined(federation)["trust"].status == "problem"


def data_is(federation: Federation, table: str) -> Check:
    """What is said of a source of data."""
    path = federation.folder / "site-a" / "site.toml"
    text = "\n".join(
        line for line in path.read_text().splitlines() if not line.startswith("source")
    )
    path.write_text(text.replace("\n[data]\n", f"\n[data]\n{table}\n"))
    return examined(federation)["data"]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ('source = "no_such_module:load"', "no_such_module"),
        ('source = "clients.data:nothing"', "nothing"),
        ('source = "file:///no/such/folder"', "/no/such/folder"),
    ],
)
def test_data_that_is_missing(federation: Federation, table: str, text: str):
    """A run would find it only when it asks the site."""
    found = data_is(federation, table)
    assert found.status == "problem"
    assert text in found.found


@pytest.mark.parametrize("kind", ["", "none", "own", "public", "pooled"])
def test_preprocessing_that_private_jobs_refuse_is_a_warning(
    federation: Federation, kind: str
):
    table = f'source = "support.users_module:undeclared"\npreprocessing = "{kind}"'
    assert data_is(federation, table).status == "ok"
    found = examined(federation).get("preprocessing")
    assert (found is None) == (kind in {"none", "public"})
    assert found is None or (found.status, "'record'" in found.found) == (
        "warning",
        True,
    )


def test_limit_for_all_runs_is_demanded(federation: Federation):
    """Without it the site refuses every private job, which is better known before."""
    path = federation.folder / "site-a" / "site.toml"
    found = examined(federation)["budget"]
    assert found.status == "ok"
    assert "epsilon 16 " in found.found
    path.write_text(path.read_text().replace("total_epsilon = 16.0\n", ""))
    found = examined(federation)["budget"]
    assert found.status == "warning"
    assert "policy.total_epsilon" in found.advice


def test_skew_that_a_request_cannot_show_is_not_reported():
    """A date has whole seconds, and is as old as its way here was long."""
    date = "Thu, 01 Jan 1970 01:00:00 GMT"
    found = {
        now: [check.found for check in doctor_site._skew(date, now, 0.5)]
        for now in (3598.0, 3599.1, 3601.4, 3602.0)
    }
    assert found == {
        3598.0: ["2 s behind the aggregator's"],
        3599.1: ["less than 3.0 s"],
        3601.4: ["less than 3.0 s"],
        3602.0: ["2 s ahead of the aggregator's"],
    }


def test_clock_is_a_problem_where_flower_refuses_its_signatures():
    """It accepts those of a clock that is minutes behind, but not of one ahead."""
    date = "Thu, 01 Jan 1970 01:00:00 GMT"
    found = {
        skew: [check.status for check in doctor_site._skew(date, 3600.0 + skew, 0.1)]
        for skew in (-300.0, -200.0, 3.0, 20.0)
    }
    assert found == {
        -300.0: ["problem"],
        -200.0: ["ok"],
        3.0: ["ok"],
        20.0: ["problem"],
    }
