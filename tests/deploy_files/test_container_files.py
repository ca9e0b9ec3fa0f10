"""The files of deploy/containers, without building anything."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.containers import image
from support.programs import needs, program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "containers"
HEALTH = FOLDER / "health.py"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing():
    done = run(
        program("hadolint"), "--failure-threshold", "style", FOLDER / "Containerfile"
    )
    assert done.returncode == 0, done.stdout


@needs("bash")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--accelerator", "tpu"], "--accelerator is cpu or cuda"),
        (["--gpu", "yes"], "unknown argument --gpu"),
    ],
)
def test_mistakes_of_the_build_are_explained(arguments: list[str], reason: str):
    done = run(FOLDER / "build", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_tests_name_the_version_of_this_tree():
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.MULTILINE)
    assert f":{version}-cpu" in image("site")


def test_every_stage_that_starts_is_without_root():
    """The last user before a start is a number, which Kubernetes can check."""
    text = (FOLDER / "Containerfile").read_text()
    for party in ("site", "aggregator"):
        stage = text.split(f"FROM runtime AS {party}\n")[1].split("\nFROM ")[0]
        assert re.findall(r"^USER (.*)", stage, re.MULTILINE) == ["10001:10001"]
        assert f'health.py", "{party}"' in stage


def check(kind: str, config: Path) -> tuple[int, str]:
    done = run(sys.executable, "-I", HEALTH, kind, config)
    return done.returncode, done.stderr


def test_health_says_what_is_wrong(tmp_path: Path):
    """A site without a connection, a missing file, an aggregator that is not there."""
    config = tmp_path / "site.toml"
    assert check("site", config)[0] == 1
    config.write_text('[aggregator]\naddress = "a.example.org:9"\n')
    assert check("site", config) == (
        1,
        "no connection to the aggregator at a.example.org:9\n",
    )
    assert check("aggregator", config)[0] == 1
