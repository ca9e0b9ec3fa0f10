"""The units of deploy/systemd: sound, as closed as their page says, and true."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.deployment import SITES, deployed
from support.programs import needs

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
PROGRAM = "/opt/crossfed/bin/crossfed"
# The scores of the page are those of this version.
VERSION = "252"
SCORE = re.compile(r"exposure level for (\S+): ([\d.]+) ")
STATED = re.compile(r"^\| `(\S+)` \| ([\d.]+) \|", re.MULTILINE)
MOST_STATES = 500
STOP_SECONDS = {"crossfed-aggregator.service": 30, "crossfed-site.service": 10}

needs_analyze = needs("systemd-analyze")


def analyze(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", *arguments],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def values(unit: str, key: str) -> list[str]:
    text = (FOLDER / unit).read_text()
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@needs_analyze
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_reads_every_line(unit: str, tmp_path: Path):
    """It fails for a key that it does not know, and for a program that is missing."""
    text = (FOLDER / unit).read_text().replace(PROGRAM, sys.executable)
    (tmp_path / unit).write_text(text)
    said = analyze("verify", "--man=no", "--recursive-errors=no", tmp_path / unit)
    assert unit not in said


@needs_analyze
def test_units_are_as_closed_as_their_page_says():
    """Every unit is in the table, with the score that systemd gives it."""
    if f"systemd {VERSION} " not in analyze("--version"):
        pytest.skip(f"the page has the scores of systemd {VERSION}")
    found = {}
    for unit in UNITS:
        (score,) = SCORE.findall(analyze("security", "--offline=true", FOLDER / unit))
        found[score[0]] = score[1]
    stated = dict(STATED.findall((FOLDER / "README.md").read_text()))
    assert found == stated
    assert all(float(score) < 2 for score in stated.values())


@pytest.mark.parametrize("unit", STOP_SECONDS)
def test_there_is_time_to_say_farewell(unit: str):
    """SIGTERM is the leave notice; the second signal cannot be caught."""
    (seconds,) = values(unit, "TimeoutStopSec")
    assert int(seconds.removesuffix("s")) >= STOP_SECONDS[unit]
    assert values(unit, "KillSignal") == []
    assert values(unit, "KillMode") == ["mixed"]


def test_only_what_reports_has_a_watchdog():
    """A site may train for hours and report nothing."""
    watched = [unit for unit in UNITS if values(unit, "WatchdogSec")]
    assert watched == ["crossfed-aggregator.service"]


def test_coordinators_may_give_up_rights():
    """Without the calls of Landlock they would keep reading the host's secrets."""
    allowed = " ".join(values("crossfed-aggregator.service", "SystemCallFilter"))
    for call in ("create_ruleset", "add_rule", "restrict_self"):
        assert f"landlock_{call}" in allowed


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The end of the socket that systemd would listen on."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(120)
        yield end


@pytest.mark.slow
@pytest.mark.deploy
@pytest.mark.flower
@needs("nginx")
def test_both_parties_report(manager: socket.socket, tmp_path: Path):
    """Ready when it serves, alive about once a second, and connected, in words."""
    policy = 'privacy = "none"\n'
    name = str(tmp_path / "notify")
    with deployed(
        tmp_path / "fed", policy, sites=SITES[:1], environment={"NOTIFY_SOCKET": name}
    ):
        states = list[str]()
        while len(states) < MOST_STATES and not (
            states.count("READY=1\nWATCHDOG=1") >= 3  # the aggregator
            and "READY=1" in states  # the site
            and any("STATUS=connected to" in state for state in states)
        ):
            states.append(manager.recv(4096).decode())
    assert len(states) < MOST_STATES, states
