"""What tests need of a machine beyond Python: the one way to ask for it.

A test that needs something which is not here is skipped, and its reason says what to
do; ``conftest.py`` counts these reasons at the end. `make test` installs what it may.
"""

import os
import shutil
from pathlib import Path

import pytest
from support import containers, line, proxy_server

# Where `make deploy-tools` installs.
_TOOLS = Path(__file__).resolve().parents[2] / ".venv-deploy" / "bin"
ROOT, TUN, IMAGES, AXE = "root", "TUN devices", "images", "axe-core"
# What `make test-browser` fetches: finds what keeps people from using a page.
AXE_SCRIPT = _TOOLS.parents[1] / ".venv-browser" / "axe.min.js"

# How to get each, and which tests are skipped without it.
NEEDS = {
    ROOT: ("run as root", "what only root may do"),
    TUN: ("allow /dev/net/tun", "hosts that are far from each other"),
    "chromium": ("make test-browser", "live pages in a browser"),
    AXE: ("make test-browser", "accessibility of live pages"),
    "prometheus": ("make test-long", "metrics in a real Prometheus"),
    "promtool": ("apt-get install prometheus", "alert rules, as Prometheus reads them"),
    "nginx": ("apt-get install nginx-light", "federations of processes behind a proxy"),
    "ip": ("apt-get install iproute2", "hosts with a network of their own"),
    "git": ("apt-get install git", "benchmarks of commits"),
    "mount": ("apt-get install mount", "full disks"),
    "g++": ("apt-get install g++", "models that torch compiles"),
    "cloud-init": ("apt-get install cloud-init", "schema of machines' user data"),
    "systemd-analyze": ("apt-get install systemd", "systemd units"),
    "podman": ("make test-deploy", "containers"),
    IMAGES: ("make test-deploy", "containers of our images"),
    "debootstrap": ("make test-deploy", "machines that install a site"),
    "iptables": ("make test-deploy", "containers' networks"),
    "gcloud": ("install the Google Cloud CLI", "Google's own client"),
    "kubectl": ("install kubectl", "overlays of Kubernetes"),
    "terraform": ("install Terraform", "modules of Terraform"),
    "hadolint": ("make manifest-tools", "container files"),
    "kubernetes-validate": ("make manifest-tools", "manifests of Kubernetes"),
    "checkov": ("make deploy-tools", "scans of deploy"),
    "cyclonedx-py": ("make deploy-tools", "bills of materials"),
}


def find(name: str) -> str | None:
    """Path of a program, or None where it is not installed."""
    return shutil.which(name, path=_TOOLS) or shutil.which(name)


def missing(*names: str) -> str:
    """Why a test that needs all of these is skipped; empty if it is not."""
    absent = [name for name in names if not _is_here(name)]
    return "; ".join(f"no {n} ({NEEDS[n][0]}): {NEEDS[n][1]}" for n in absent)


def _is_here(name: str) -> bool:
    if name == ROOT:
        return os.geteuid() == 0
    if name == TUN:
        return os.access(line.TUN, os.R_OK | os.W_OK)
    if name == AXE:
        return AXE_SCRIPT.exists()
    if name == "nginx":  # Which may be in a folder that PATH does not name.
        return proxy_server.installed()
    if name == IMAGES:  # Without podman, that is what is missing.
        return find("podman") is None or containers.are_built()
    return find(name) is not None


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test, or all tests of a module, that needs something; see ``NEEDS``."""
    why = missing(*names)
    return pytest.mark.skipif(bool(why), reason=why or "nothing is missing")


def program(name: str) -> str:
    """Path of a program; skips the test that asks for it where it is not installed."""
    if (found := find(name)) is None:
        pytest.skip(missing(name))
    return found
