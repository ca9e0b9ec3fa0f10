"""Containers of this repository's images, as `make test-images` builds them."""

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Settings and storage of podman that are ours alone; see tools/test_images.
PLACE = ROOT / "build" / "containers"
SETTINGS = {
    "CONTAINERS_CONF": str(PLACE / "containers.conf"),
    "CONTAINERS_STORAGE_CONF": str(PLACE / "storage.conf"),
}
USER = 10001
STATE = "/var/lib/crossfed"
CLOSED = (
    "--read-only",
    "--read-only-tmpfs=false",
    *("--tmpfs", "/tmp:rw,size=1g,mode=1777"),  # noqa: S108 (in the container)
    *("--cap-drop", "all"),
    *("--security-opt", "no-new-privileges"),
)


def image(party: str) -> str:
    return f"localhost/crossfed-test-{party}:0.1.0-cpu"


def environment() -> dict[str, str]:
    """What podman reads."""
    return {**os.environ, **SETTINGS}


def run(
    *arguments: str, given: str = "", seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run podman, whatever comes of it."""
    return subprocess.run(
        ["podman", *arguments],  # noqa: S607
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env=environment(),
    )


def podman(*arguments: str, code: int | None = 0, given: str = "") -> str:
    """Run podman; its output, if its exit code is the one that is named."""
    done = run(*arguments, given=given)
    if code is not None:
        assert done.returncode == code, (arguments, done.stdout, done.stderr[-4000:])
    return done.stdout


@functools.cache
def are_built() -> bool:
    """Whether there are images of both parties; needs podman."""
    return not any(
        run("image", "exists", image(p)).returncode for p in ("aggregator", "site")
    )


def folder(path: Path) -> Path:
    """A folder of the containers' user."""
    path.mkdir()
    path.chmod(0o700)
    os.chown(path, USER, USER)
    return path


def is_well(container: str) -> bool:
    """Whether the image's own check passes; podman itself asks only under systemd."""
    return run("healthcheck", "run", container).returncode == 0


def end(containers: Sequence[str]) -> None:
    """End containers, whether they are there or not."""
    for name in containers:
        podman("rm", "--force", "--time", "0", "--ignore", name)
