"""A machine of a cloud installs a site, in its distribution and behind our rules.

As far as one machine can show it: user data is written into an Ubuntu 24.04 as its
image would have it, and the start script runs there, in a network that lets out the
ports of our Terraform modules alone. Packages, versions and the release come from where
they come from there. Not here: cloud-init, systemd, whose commands only note what they
are told, and torch, whose files for this platform have gigabytes.
"""

import contextlib
import functools
import http.server
import json
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pin_files
import pytest
from integration.test_distribution import (
    wheel as wheel,  # noqa: PLC0414 -- a fixture
)
from support import open_world
from support.module_networks import ports_out
from support.network import Network, network
from support.programs import ROOT, needs, program

from cloud_adapters.compute.pool import NodeSpec
from deploy.fleet import bootstrap, wanted
from deploy.fleet.bootstrap import MachineInvitation, Release, render
from federation.clock import SystemClock
from privacy.membership import certificates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.long,
    pytest.mark.timeout(900),
    needs(ROOT, "ip", "debootstrap", "mount"),
]

ARCHIVE, RELEASES = "http://archive.ubuntu.com/ubuntu", "releases.example.org"
# What Ubuntu's cloud image has on EC2; its archive by way of the region, on port 80.
SOURCES = """\
Types: deb
URIs: http://us-east-1.ec2.archive.ubuntu.com/ubuntu/
Suites: noble noble-updates
Components: main universe
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg

Types: deb
URIs: http://security.ubuntu.com/ubuntu/
Suites: noble-security
Components: main universe
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""
# They write down what they are told.
NOTED = ("systemctl", "shutdown")
SMALL = {
    *("boto3", "botocore", "jmespath", "python-dateutil", "s3transfer", "six"),
    *("cffi", "cryptography", "google-crc32c", "jinja2", "markupsafe", "pycparser"),
    *("markdown-it-py", "mdurl", "numpy", "pygments", "rich", "safetensors", "shtab"),
    *("tomli-w", "urllib3"),
}
BEYOND = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        with socket.create_connection(("aggregator.example.org", port), 5) as there:
            print(port, there.recv(9).decode())
    except OSError as error:
        print(port, error.errno)
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What Ubuntu's image has of what matters: Python, curl and authorities; no pip."""
    root = tmp_path_factory.mktemp("noble")
    scripts = Path("/usr/share/debootstrap/scripts")
    found = [each for each in ("noble", "gutsy") if (scripts / each).exists()]
    made = subprocess.run(
        [
            program("debootstrap"),
            "--variant=minbase",
            # A Debian has no keys of Ubuntu; the packages below are checked there.
            "--no-check-gpg",
            "--include=ca-certificates,curl,python3",
            "noble",
            root,
            ARCHIVE,
            *(str(scripts / each) for each in found[:1]),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode and "Invalid Release" in made.stdout + made.stderr:
        pytest.skip(f"{ARCHIVE} cannot be reached: machines that install a site")
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr
    yield root
    shutil.rmtree(root)


@pytest.fixture
def release(wheel: Path, tmp_path: Path) -> Path:
    """The wheel of ``make dist``, which pins only what has no gigabytes."""
    made = tmp_path / "served" / wheel.name
    made.parent.mkdir()
    shutil.copy(wheel, made)
    texts = {}
    for name, text in pin_files.pinned().items():
        blocks = re.findall(r"^\S.*\n(?: .*\n)*", text, re.MULTILINE)
        small = [block for block in blocks if block.partition("==")[0] in SMALL]
        assert all("--hash=sha256:" in block for block in small)
        texts[name] = "".join(small)
    pin_files.add(made, texts)
    return made


@contextlib.contextmanager
def served(folder: Path, place: Path) -> Iterator[tuple[int, bytes]]:
    """Serve a folder over TLS; the port, and the authority that vouches for it."""
    authority = certificates.Authority.create("releases", clock=SystemClock())
    key = certificates.new_key()
    (place / "key.pem").write_bytes(certificates.key_pem(key))
    (place / "chain.pem").write_bytes(authority.issue_server((RELEASES,), key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "chain.pem", place / "key.pem")
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(folder)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, authority.pem
        finally:
            server.shutdown()
            thread.join()


def close(made: Network, ports: set[int]) -> None:
    """Let a machine reach these ports alone, and names: as the modules' rules do."""
    inside = [*made.inside("machine"), "ip"]
    rules = [("udp", 53), *(("tcp", port) for port in sorted(ports))]
    for protocol, port in rules:
        rule = ["ipproto", protocol, "dport", str(port), "lookup", "main"]
        subprocess.run([*inside, "rule", "add", "pref", "10", *rule], check=True)
    for any_port in ("32766", "32767"):  # The kernel's own rules.
        subprocess.run([*inside, "rule", "del", "pref", any_port], check=True)


def write(root: Path, user_data: str) -> None:
    """Do what cloud-init does with the files of user data."""
    for each in json.loads(user_data.partition("\n")[2])["write_files"]:
        path = root / each["path"].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(each["content"])
        path.chmod(int(each["permissions"], 8))


def image(root: Path, address: str, authority: bytes) -> None:
    """Make of a bare system what its cloud's image is."""
    for old in (root / "etc/apt").glob("sources.list*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    (root / "etc/apt/sources.list.d").mkdir()
    (root / "etc/apt/sources.list.d/ubuntu.sources").write_text(SOURCES)
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text(f"nameserver {address}\n")
    bundle = "etc/ssl/certs/ca-certificates.crt"
    # Those that this host trusts on its way to the same mirrors.
    (root / bundle).write_bytes((Path("/") / bundle).read_bytes() + authority)
    (root / "etc/pip.conf").write_text(f"[global]\ncert = /{bundle}\n")
    (root / "dev/console").unlink(missing_ok=True)
    (root / "dev/console").touch()
    noted = {name: f'echo {name} "$@" >> /noted' for name in NOTED}
    user = "useradd --system --no-create-home crossfed-site"
    for name, text in {**noted, "systemd-sysusers": user}.items():
        path = root / "usr/local/sbin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


def run(made: Network, root: Path, *command: str) -> str:
    """Run a command of the machine; what it writes."""
    mount = 'mount -t proc proc "$1/proc"; exec chroot "$@"'
    path = "PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        [
            *made.inside("machine"),
            *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
            *("sh", "-ec", mount, "sh", str(root), "env", "-i", path, *command),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def test_a_machine_installs_a_site_behind_our_rules(
    distribution: Path, release: Path, tmp_path: Path
):
    """From user data to the site's own program; nothing but TLS has left."""
    (ports, others) = ports_out()
    assert ports == others
    user_data = render(
        NodeSpec(name="site-a", labels={}, max_seconds=3600.0),
        Release(
            wheel=f"https://{RELEASES}/{release.name}",
            sha256=sha256(release.read_bytes()).hexdigest(),
            extras=("aws",),
        ),
        'name = "a"\n',
        {name: (wanted._UNITS / name).read_text() for name in wanted._UNIT_NAMES},
        MachineInvitation(token="t", organisation="o", platform="aws"),  # noqa: S106
    )
    says = dict.fromkeys((80, *(ports - {443})), "it is open")
    with (
        network(["machine"]) as made,
        served(release.parent, tmp_path) as (port, authority),
        open_world.serve(made.address, {RELEASES: ("127.0.0.1", port)}, says) as asked,
    ):
        close(made, ports)
        image(distribution, made.address, authority)
        write(distribution, user_data)
        probed = run(
            made, distribution, "python3", "-c", BEYOND, *map(str, says)
        ).splitlines()
        said = run(made, distribution, "/usr/local/sbin/crossfed-start")
        version = run(made, distribution, "/opt/crossfed/bin/crossfed", "--version")
    # The rules are those of the modules, or the rest would show nothing.
    for port in says:
        is_open = any(line == f"{port} it is ope" for line in probed)
        assert is_open == (port != 80), probed
    console_text = (distribution / "dev/console").read_text()
    assert console_text.splitlines()[-1:] == [f"crossfed: {bootstrap.READY}"], said
    noted = (distribution / "noted").read_text().splitlines()
    assert noted[-1] == "systemctl enable --now crossfed-site.service"
    assert "systemctl start crossfed-enrol.service" in noted
    assert version.strip().endswith(release.name.split("-")[1])
    assert {RELEASES, "archive.ubuntu.com", "security.ubuntu.com"} <= asked
    settings = distribution / "var/lib/crossfed-site/site.toml"
    assert settings.read_text() == 'name = "a"\n'
    assert settings.stat().st_mode & 0o777 == 0o600
