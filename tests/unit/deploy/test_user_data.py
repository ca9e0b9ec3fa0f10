"""User data of a site's machine: what cloud-init reads, and what the machine runs."""

import hashlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import programs
from support.module_networks import ports_out

from cloud_adapters.compute.pool import NodeSpec
from deploy.fleet.bootstrap import MAX_BYTES, MachineInvitation, Release, render
from privacy.membership.token import Token

UNITS = {
    path.name: path.read_text()
    for path in (Path(__file__).parents[3] / "deploy" / "systemd").iterdir()
    if path.name.startswith(
        ("crossfed-site", "crossfed-enrol", "crossfed.sysusers", "nvidia")
    )
}
SPEC = NodeSpec(name="site-a.b", labels={}, max_seconds=4 * 3600.0)
GPU_SPEC = replace(SPEC, gpus=2)
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


def document(release: Release, spec: NodeSpec = SPEC, **changed: Any) -> dict[str, Any]:
    text = render(spec, release, changed.get("site_toml", SITE_TOML), UNITS, INVITATION)
    assert text.startswith("#cloud-config\n")
    found: dict[str, Any] = json.loads(text.partition("\n")[2])
    return found


def files(release: Release, spec: NodeSpec = SPEC) -> dict[str, str]:
    written = document(release, spec)["write_files"]
    return {each["path"]: each["content"] for each in written}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RELEASES)
def test_cloud_init_reads_it(kind: str, tmp_path: Path):
    """By its own schema, which knows every key."""
    program = programs.program("cloud-init")
    path = tmp_path / "user-data"
    path.write_text(render(GPU_SPEC, RELEASES[kind], SITE_TOML, UNITS, INVITATION))
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
    program = programs.program("systemd-analyze")
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
    program = programs.program("systemd-analyze")
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
    found = files(RELEASES[kind], GPU_SPEC)
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
    (unpack,) = (i for i, line in enumerate(lines) if "zipfile --extract" in line)
    assert check < unpack
    assert (
        found["/etc/systemd/system/crossfed-site.service"]
        == (UNITS["crossfed-site.service"])
    )
    assert "/usr/lib/sysusers.d/crossfed.conf" in found


def test_a_wheel_of_another_digest_is_refused(tmp_path: Path):
    """By the very line that the machine runs."""
    script = files(RELEASES["https"])["/usr/local/sbin/crossfed-start"]
    (line,) = (line for line in script.splitlines() if "sha256sum" in line)
    assert script.index("sha256sum") < script.index("zipfile --extract")
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
    head, _, _ = script.partition("if ! {")
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


DROP_IN = "/etc/systemd/system/crossfed-site.service.d"
SCRIPT = "/usr/local/sbin/crossfed-start"


def run(script: str, programs: dict[str, str], folder: Path) -> str:
    """What a part of a script writes, with programs of ours before others."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "console").touch()
    for word, kept in (("tee", "tee -a"), (">", ">>")):  # A file is not a terminal.
        script = script.replace(f"{word} /dev/console", f"{kept} {folder}/console")
    done = subprocess.run(
        ["bash", "-c", f"PATH={folder}:$PATH\n{script}\necho went on"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_machine_with_gpus_lets_the_site_use_them():
    """The unit hides all devices but those of this drop-in."""
    found = files(RELEASES["https"], GPU_SPEC)
    assert "DeviceAllow=char-nvidia rw" in found[f"{DROP_IN}/nvidia.conf"]
    assert f"{DROP_IN}/nvidia.conf" not in files(RELEASES["https"])
    unit = "/etc/systemd/system/crossfed-site.service"
    assert " --device nvidia.com/gpu=all " in files(RELEASES["image"], GPU_SPEC)[unit]
    assert "nvidia" not in files(RELEASES["image"])[unit]


@pytest.mark.parametrize("kind", RELEASES)
def test_a_machine_without_its_gpus_is_told_and_ends(kind: str, tmp_path: Path):
    """Before it downloads or enrols: its CPU would train at the price of GPUs."""
    script = files(RELEASES[kind], GPU_SPEC)[SCRIPT]
    head = script[: script.index("if ! {")]
    one = "echo GPU 0: NVIDIA A10G"
    programs = {"shutdown": "exit 0", "nvidia-smi": one}
    assert "went on" not in run(head, programs, tmp_path)
    console = (tmp_path / "console").read_text()
    assert "1 GPUs are visible, 2 are paid for" in console
    assert "site was not started" in console
    programs["nvidia-smi"] = f"{one}; {one}"
    assert "went on" in run(head, programs, tmp_path)
    assert "nvidia-smi" not in files(RELEASES[kind])[SCRIPT]


# As Ubuntu 24.04 on EC2 and Compute Engine has them, and Debian 12 there.
SOURCES = """\
Types: deb
URIs: http://us-east-1.ec2.archive.ubuntu.com/ubuntu/ http://archive.ubuntu.com/ubuntu
Suites: noble noble-updates noble-backports
URIs: http://us-central1.gce.archive.ubuntu.com/ubuntu
URIs: http://security.ubuntu.com/ubuntu
deb http://deb.debian.org/debian bookworm main
deb http://cdn-aws.deb.debian.org/debian bookworm main
deb http://security.debian.org/debian-security bookworm-security main
URIs: mirror+file:/etc/apt/mirrors/debian.list
"""


@pytest.mark.parametrize("kind", RELEASES)
def test_our_networks_let_out_all_that_a_machine_needs(kind: str, tmp_path: Path):
    """Packages, the release and the aggregator: by name, and nothing by port 80."""
    found = files(RELEASES[kind])
    (sed,) = re.findall(r"sed .*?(?= \{\})", found[SCRIPT], re.DOTALL)
    sources = tmp_path / "sources"
    sources.write_text(SOURCES)
    run(f"{sed} {sources}", {}, tmp_path)
    mirrors = sources.read_text()
    assert "https://archive.ubuntu.com/ubuntu/ https://archive" in mirrors
    text = "\n".join([mirrors, *found.values()])
    # No rule filters the metadata service of a machine.
    text = text.replace("http://metadata.google.internal", "")
    # What the script looks for is not where it connects to.
    text = text.replace(sed, "")
    schemes = set(re.findall(r"\b([a-z0-9]+)://", text)) - {"s3", "gs"}
    assert schemes == {"https"}
    token = Token.parse(enrolment(kind)[enrolment(kind).index("enroll") + 1])
    wanted = {443, int(token.address.rpartition(":")[2])}
    assert ports_out() == [wanted, wanted]


@pytest.mark.parametrize(
    ("host", "signs_in"),
    [
        ("123456789012.dkr.ecr.eu-west-3.amazonaws.com", "ecr-login"),
        ("europe-west4-docker.pkg.dev", "login --authfile"),
        ("registry.example.org", ""),
    ],
)
def test_registries_of_clouds_know_the_machine(
    host: str, signs_in: str, tmp_path: Path
):
    """By who it is; its token is on no command line, and on no disk afterwards."""
    release = Release(image=f"{host}/crossfed/site@sha256:{DIGEST}")
    script = files(release)[SCRIPT]
    begin = script.index("\n", script.index("\nfi\n") + 1)
    part = script[begin : script.index("install -d", begin)]
    part = part.replace("/run/", f"{tmp_path}/")
    said = run(
        f"set -e\n{part}",
        {
            "curl": 'echo \'{"access_token": "secret"}\'',
            "podman": f'echo "podman $*"; [ $1 != login ] || cat > {tmp_path}/token; '
            f"cat {tmp_path}/crossfed-registry.json 2>/dev/null; "
            f"touch {tmp_path}/crossfed-registry.json",
        },
        tmp_path,
    )
    assert said.endswith("went on\n")
    assert f"podman pull {release.image}" in said
    assert (signs_in in said) if signs_in else ("authfile" not in said)
    assert "secret" not in said
    if "pkg.dev" in host:
        assert (tmp_path / "token").read_text() == "secret\n"
    if signs_in:
        assert not (tmp_path / "crossfed-registry.json").exists()
    assert ("amazon-ecr-credential-helper" in script) == ("ecr" in host)


def test_files_are_those_that_the_wheel_names():
    """Its digest pins them, too; of a source archive nothing would."""
    lines = files(RELEASES["gs"])[SCRIPT].splitlines()
    (check,) = (i for i, x in enumerate(lines) if "sha256sum" in x)
    unpacked = "/var/tmp/crossfed"  # noqa: S108 -- of a new machine
    lists = " ".join(
        f"--requirement {unpacked}/crossfed/requirements/{name}.txt"
        for name in ("base", "flower")
    )
    pip = "/opt/crossfed/bin/pip install --quiet"
    assert lines[check + 1 : check + 4] == [
        (
            "/opt/crossfed/bin/python -m zipfile --extract "
            f"{unpacked[:9]}{WHEEL} {unpacked}"
        ),
        f"{pip} --only-binary :all: --require-hashes {lists}",
        f"{pip} --no-deps {unpacked[:9]}{WHEEL}",
    ]
