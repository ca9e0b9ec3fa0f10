"""User data of a site's machine: what cloud-init reads, and what the machine runs."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloud_adapters.compute.pool import NodeSpec
from deploy.fleet.starting.user_data import (
    MAX_BYTES,
    MachineInvitation,
    Release,
    render,
)
from privacy.membership.token import Token

UNITS = {
    path.name: path.read_text()
    for path in (Path(__file__).parents[3] / "deploy" / "systemd").iterdir()
    if path.name.startswith(("crossfed-site", "crossfed-enrol", "crossfed.sysusers"))
}
SPEC = NodeSpec(name="site-a.b", labels={}, max_seconds=4 * 3600.0)
DIGEST = "ab" * 32
WHEEL = "crossfed-0.1.0-py3-none-any.whl"
RELEASES = {
    "https": Release(wheel=f"https://example.org/{WHEEL}", sha256=DIGEST),
    "s3": Release(wheel=f"s3://releases/a b/{WHEEL}", sha256=DIGEST),
    "gs": Release(wheel=f"gs://releases/a b/{WHEEL}", sha256=DIGEST),
    "image": Release(image=f"registry.example.org/crossfed-site@sha256:{DIGEST}"),
}
INVITATION = MachineInvitation(
    token=f"crossfed-id-1.10.0.0.1:8443.{DIGEST}.a.b",
    organisation='Hôpital "A" \\ 100 % $HOME',
    platform="aws",
    region="eu-west-3",
)
SITE_TOML = 'name = "a.b"\n[policy]\nprivacy = "record"\n'


def document(release: Release, **changed: Any) -> dict[str, Any]:
    text = render(SPEC, release, changed.get("site_toml", SITE_TOML), UNITS, INVITATION)
    assert text.startswith("#cloud-config\n")
    found: dict[str, Any] = json.loads(text.partition("\n")[2])
    return found


def files(release: Release) -> dict[str, str]:
    return {each["path"]: each["content"] for each in document(release)["write_files"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RELEASES)
def test_cloud_init_reads_it(kind: str, tmp_path: Path):
    """By its own schema, which knows every key."""
    program = shutil.which("cloud-init")
    if program is None:
        pytest.skip("cloud-init is not installed")
    path = tmp_path / "user-data"
    path.write_text(render(SPEC, RELEASES[kind], SITE_TOML, UNITS, INVITATION))
    done = subprocess.run(
        [program, "schema", "--config-file", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valid cloud-config" in done.stdout


@pytest.mark.slow
def test_systemd_reads_the_unit_of_a_container(tmp_path: Path):
    """It fails for a key that it does not know."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "crossfed-site.service"
    text = files(RELEASES["image"])[f"/etc/systemd/system/{unit.name}"]
    unit.write_text(text.replace("/usr/bin/podman", sys.executable))
    done = subprocess.run(
        [program, "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert unit.name not in done.stdout + done.stderr


def enrolment(kind: str) -> list[str]:
    """Words of the command that enrols a machine."""
    found = files(RELEASES[kind])
    if kind == "image":
        script = found["/usr/local/sbin/crossfed-start"]
        (line,) = (x for x in script.splitlines() if x.startswith("podman run"))
        return shlex.split(line)
    unit = found["/etc/systemd/system/crossfed-enrol.service.d/machine.conf"]
    lines = [x for x in unit.splitlines() if x.startswith("ExecStart=")]
    assert lines[0] == "ExecStart="  # Instead of the token of a person.
    return shlex.split(lines[1].replace("%%", "%").replace("$$", "$"))


@pytest.mark.parametrize("kind", RELEASES)
def test_the_machine_enrols_before_it_starts(kind: str):
    """By who it is; nothing that is secret is in what every program can read."""
    words = enrolment(kind)
    at = words.index("enroll")
    options = dict(zip(words[at + 2 :: 2], words[at + 3 :: 2], strict=True))
    assert words[at + 1] == INVITATION.token
    assert Token.parse(words[at + 1]).secret == b""
    assert options["--platform"] == "aws"
    assert options["--region"] == "eu-west-3"
    assert options["--organisation"] == INVITATION.organisation
    script = files(RELEASES[kind])["/usr/local/sbin/crossfed-start"]
    enrols = "podman run" if kind == "image" else "systemctl start crossfed-enrol"
    assert script.index(enrols) < script.index("systemctl enable --now crossfed-site")


@pytest.mark.slow
def test_systemd_reads_the_command_of_a_machine(tmp_path: Path):
    """With quotes and percent signs in the name of an organisation."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    found = files(RELEASES["https"])
    unit = tmp_path / "crossfed-enrol.service"
    text = found["/etc/systemd/system/crossfed-enrol.service"]
    more = found["/etc/systemd/system/crossfed-enrol.service.d/machine.conf"]
    unit.write_text((text + more).replace("/opt/crossfed/bin/crossfed", "/bin/true"))
    done = subprocess.run(
        [program, "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert unit.name not in done.stdout + done.stderr


def test_yaml_reads_every_character():
    """Cloud-init reads YAML, which knows no characters in two halves."""
    said = 'a "🏥🔬" \\ud83d\\udd2c ü \u2028 \\'
    text = render(SPEC, RELEASES["s3"], said, UNITS, INVITATION)
    (found,) = (
        each["content"]
        for each in yaml.safe_load(text)["write_files"]
        if each["path"] == "/etc/crossfed/site.toml"
    )
    assert found == said


@pytest.mark.parametrize("kind", RELEASES)
def test_the_machine_ends_whatever_fails(kind: str):
    """The timer is set before anything that can fail, and waits for nobody."""
    found = document(RELEASES[kind])
    ((*words,),) = found["bootcmd"]
    assert words[:2] == ["systemd-run", "--no-block"]
    assert "--on-boot=14400s" in words
    assert words[-3:] == ["/usr/sbin/shutdown", "--poweroff", "now"]


@pytest.mark.parametrize("kind", RELEASES)
def test_bash_reads_the_script(kind: str):
    """And the digest is compared before anything of the wheel is used."""
    found = files(RELEASES[kind])
    (script,) = (text for text in found.values() if text.startswith("#!/bin/bash"))
    done = subprocess.run(
        ["bash", "-n"],  # noqa: S607
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert found["/etc/crossfed/site.toml"] == SITE_TOML
    lines = script.splitlines()
    if kind == "image":
        assert f"podman pull {RELEASES[kind].image}" in lines
        return
    (check,) = (i for i, line in enumerate(lines) if "sha256sum --check" in line)
    (install,) = (
        i
        for i, line in enumerate(lines)
        if f"{WHEEL}[flower]" in line and "pip" in line
    )
    assert check < install
    assert (
        found["/etc/systemd/system/crossfed-site.service"]
        == (UNITS["crossfed-site.service"])
    )
    assert "/usr/lib/sysusers.d/crossfed.conf" in found


def test_a_wheel_of_another_digest_is_refused(tmp_path: Path):
    """By the very line that the machine runs."""
    script = files(RELEASES["https"])["/usr/local/sbin/crossfed-start"]
    (line,) = (line for line in script.splitlines() if "sha256sum" in line)
    wheel = tmp_path / WHEEL
    wheel.write_bytes(b"another")
    (place,) = re.findall(rf"/\S+/{WHEEL}", line)
    line = line.replace(place, str(wheel))
    for digest, code in ((DIGEST, 1), (hashlib.sha256(b"another").hexdigest(), 0)):
        words = ["bash", "-c", line.replace(DIGEST, digest)]
        done = subprocess.run(words, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_a_step_that_fails_is_told_and_ends_the_machine(tmp_path: Path):
    """With its line, on the console that the cloud keeps."""
    script = files(RELEASES["https"])["/usr/local/sbin/crossfed-start"]
    head, _, _ = script.partition("systemd-sysusers")
    said = tmp_path / "console"
    said.touch()
    head = head.replace("/dev/console", str(said))
    (tmp_path / "shutdown").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/ended\n')
    (tmp_path / "shutdown").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"PATH={tmp_path}:$PATH\n{head}false\necho went on"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert re.search(r"the site was not started: line \d+ of", said.read_text())
    assert (tmp_path / "ended").read_text() == "--poweroff +5\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "not both"),
        ({"wheel": "https://x/y.whl", "image": "z"}, "not both"),
        ({"image": "site:latest"}, "names no digest"),
        ({"wheel": "http://x/y.whl", "sha256": DIGEST}, "no wheel at https"),
        ({"wheel": "https://x/y.tar.gz", "sha256": DIGEST}, "no wheel at https"),
        ({"wheel": "https://x/y.whl"}, "no SHA-256"),
    ],
)
def test_a_release_is_pinned(given: dict[str, str], words: str):
    """What a name means can change."""
    with pytest.raises(ValueError, match=words):
        Release(**given)


def test_more_than_clouds_take_is_refused():
    """Before anything is launched."""
    with pytest.raises(ValueError, match=f"clouds take {MAX_BYTES}"):
        render(SPEC, RELEASES["https"], "x" * MAX_BYTES, UNITS, INVITATION)
