"""The units of deploy/systemd under a real systemd, in a container of its own.

They are closed off there as on a machine, by namespaces and filters of system calls,
with the programs that they really start.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import containers
from support.containers import podman, run
from support.deployment import wait_for
from support.programs import needs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "systemd"
SYSTEMD = "/lib/systemd/systemd"
CROSSFED = "/opt/crossfed/bin/crossfed"
AGGREGATOR, SITE = "/var/lib/crossfed-aggregator", "/var/lib/crossfed-site"
NAME = "gcp-us-central1"
JOB = f"""
name = "one"
seed = 7
rounds = 2
[model]
factory = "clients.models:digits_cnn"
[data]
source = "clients.data:digits"
[training]
local_steps = 5
batch_size = 32
optimizer = {{ name = "adamw", lr = 2e-3 }}
[[sites]]
name = "{NAME}"
"""
POLICY = """
[policy]
privacy = "none"
secure_aggregation = false
min_group = 1
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("containers"),
    needs("root", "podman", "images"),
]


class Machine:
    """A container in which systemd is the first process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def shell(self, command: str, *, given: str = "", code: int | None = 0) -> str:
        start = ("exec", "--interactive", self.name, "/bin/sh", "-c", command)
        return podman(*start, given=given, code=code)

    def write(self, path: str, text: str, owner: str = "root") -> None:
        command = f"umask 077; cat > {path} && chown {owner} {path}"
        self.shell(command, given=text)

    def start(self, unit: str) -> None:
        done = run("exec", self.name, "systemctl", "start", unit)
        assert done.returncode == 0, self.journal(unit)

    def journal(self, unit: str) -> str:
        return self.shell(f"journalctl --no-pager --output cat --unit {unit}")

    def shows(self, unit: str, key: str) -> str:
        return self.shell(f"systemctl show --value --property {key} {unit}").strip()

    def as_aggregator(self, words: str) -> str:
        return self.shell(f"runuser -u crossfed-aggregator -- {CROSSFED} {words}")


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Installed as the page says, with the network of nobody else."""
    name = f"crossfed-units-{os.getpid()}"
    units = [
        part
        for unit in FOLDER.glob("*.service")
        for part in ("--volume", f"{unit}:/etc/systemd/system/{unit.name}:ro")
    ]
    users = FOLDER / "crossfed.sysusers.conf"
    try:
        done = run(
            *("run", "--detach", "--name", name, "--systemd=always", "--privileged"),
            *("--network", "none", "--user", "root", "--workdir", "/", *units),
            *("--volume", f"{users}:/usr/lib/sysusers.d/crossfed.conf:ro"),
            *("--entrypoint", SYSTEMD, containers.image("aggregator")),
        )
        if done.returncode != 0:
            pytest.skip(f"systemd does not start in a container here: {done.stderr}")
        made = Machine(name)
        wait_for(lambda: "running" in _state(name), "systemd has started", 60)
        made.shell("systemd-sysusers && systemctl daemon-reload")
        for user, folder in (
            ("crossfed-aggregator", AGGREGATOR),
            ("crossfed-site", SITE),
        ):
            made.shell(f"install -d -m 700 -o {user} -g {user} {folder}")
        yield made
    finally:
        containers.end([name])


def _state(name: str) -> str:
    return run("exec", name, "systemctl", "is-system-running").stdout


def test_the_units_enrol_train_and_leave(machine: Machine):
    """From nothing to two rounds; each unit stays within what it closes off."""
    config = f"{AGGREGATOR}/aggregator.toml"
    machine.as_aggregator(f"aggregator init {AGGREGATOR} --host localhost")
    machine.start("crossfed-aggregator")  # Returns when it has reported to be ready.
    assert machine.shows("crossfed-aggregator", "WatchdogUSec") == "3min"

    invited = machine.as_aggregator(f"aggregator invite {NAME} --config {config}")
    machine.shell("mkdir -p /etc/crossfed")
    machine.write("/etc/crossfed/token", invited.split()[-1])
    machine.start("crossfed-enrol")
    settings = machine.shell(f"cat {SITE}/site.toml").partition("[policy]")[0]
    machine.write(f"{SITE}/site.toml", settings + POLICY, "crossfed-site")
    machine.start("crossfed-site")
    wait_for(
        lambda: "connected to" in machine.shows("crossfed-site", "StatusText"),
        "the site is connected",
        60,
    )

    machine.write(f"{AGGREGATOR}/one.toml", JOB, "crossfed-aggregator")
    job = f"{AGGREGATOR}/one.toml --aggregator {config}"
    assert "status      completed" in machine.as_aggregator(f"run {job}")

    process = machine.shows("crossfed-site", "MainPID")
    status = machine.shell(f"cat /proc/{process}/status")
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status  # A filter.
    assert "CapBnd:\t0000000000000000" in status
    # Another party's folder is there, and is not writable from inside the unit.
    inside = f"nsenter --target {process} --mount --user"
    machine.shell(f"{inside} touch /etc/mine {AGGREGATOR}/mine", code=1)

    for unit in ("crossfed-site", "crossfed-aggregator"):
        machine.shell(f"systemctl stop {unit}")
        assert machine.shows(unit, "Result") == "success"


def test_a_mistake_in_the_settings_is_not_tried_again(machine: Machine):
    """Exit code 2 ends the unit, and its journal names the key."""
    machine.as_aggregator(f"aggregator init {AGGREGATOR} --host localhost")
    machine.shell(f"echo 'hosst = 1' >> {AGGREGATOR}/aggregator.toml")
    machine.shell("systemctl start crossfed-aggregator", code=1)
    assert machine.shows("crossfed-aggregator", "ActiveState") == "failed"
    assert machine.shows("crossfed-aggregator", "NRestarts") == "0"
    assert "hosst" in machine.journal("crossfed-aggregator")
