"""What ``make dist`` builds works where it is installed, and reads well there."""

import hashlib
import re
import shutil
import subprocess
import sys
import venv
from base64 import urlsafe_b64encode
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pin_files
import pytest

from deploy.cli.new_verb import example_names
from deploy.fleet import wanted

ROOT = Path(__file__).parents[2]
PUBLISHED = "https://example.org/an-owner/crossfed"
# Says where it is installed, and makes a folder.
NEW = """
import deploy, crossfed
from deploy.cli import main
print(deploy.__file__, crossfed.__file__)
raise SystemExit(main(["new", "mine"]))
"""
pytestmark = pytest.mark.slow


def output(*command: str | Path, folder: Path) -> str:
    """What a command writes."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, as whoever has only that would.

    With the build backend that is here, whose version is checked: `make test-all`
    installs it into an environment for the build, which takes longer than all else.
    """
    place = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", place, ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSFED_URL", PUBLISHED)
        output(*build, folder=place)
    assert len([*place.glob("crossfed-*.tar.gz")]) == 1
    (built,) = place.glob("crossfed-*.whl")
    return built


def test_its_links_and_addresses_lead_to_where_it_is_published(wheel: Path):
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    text = metadata.get_payload()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"aws", "gcp", "flower", "parquet", "all"} <= {
        *metadata.get_all("Provides-Extra", [])
    }
    files = f"{PUBLISHED}/blob/v{metadata['Version']}"
    assert metadata.get_all("Project-URL") == [
        f"Homepage, {PUBLISHED}",
        f"Documentation, {files}/docs/README.md",
        f"Changelog, {files}/CHANGELOG.md",
        f"Issues, {PUBLISHED}/issues",
    ]
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert all(link.startswith("https://") for link in links)
    ours = [link.partition("#")[0] for link in links if link.startswith(PUBLISHED)]
    assert f"{files}/docs/tutorial.md" in ours
    for link in ours:
        path = re.sub(rf"{PUBLISHED}/(blob|raw)/v[^/]+/", "", link)
        assert (ROOT / path).exists(), link
    assert "crossfed new my-federation" in text


def test_it_has_the_units_that_machines_of_clouds_are_given(wheel: Path):
    with ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if n.startswith("deploy/systemd/")}
    assert {f"deploy/systemd/{name}" for name in wanted._UNIT_NAMES} <= names


def test_it_has_the_examples(wheel: Path):
    """Those that `crossfed new --from` copies, and nothing that running them leaves."""
    with ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("deploy/cli/examples/")]
    folders = {name.split("/")[3] for name in names}
    assert folders == {*example_names()}
    assert {Path(name).suffix for name in names} == {".md", ".py", ".toml"}


def test_it_pins_the_files_that_machines_of_clouds_install(wheel: Path, tmp_path: Path):
    """By versions that were tested, and digests; its own list of files stays whole."""
    pinned = tmp_path / wheel.name
    shutil.copy(wheel, pinned)
    # It would take the index to ask for them.
    texts = {"crossfed/requirements/base.txt": "a==1 \\\n    --hash=sha256:00\n"}
    pin_files.add(pinned, texts)
    with ZipFile(pinned) as archive, ZipFile(wheel) as before:
        names = archive.namelist()
        assert sorted(names) == sorted([*before.namelist(), *texts])
        (record,) = (n for n in names if n.endswith("RECORD"))
        rows = dict(
            line.split(",", 1) for line in archive.read(record).decode().splitlines()
        )
        assert rows.keys() == {*names}
        for name in set(names) - {record}:
            data = archive.read(name)
            digest = urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
            assert rows[name] == f"sha256={digest.rstrip('=')},{len(data)}", name


@pytest.mark.long
def test_it_trains_where_it_is_installed(wheel: Path, tmp_path: Path):
    """In an environment of its own, which sees the dependencies that are here."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(here) + "\n")
    scripts = tmp_path / "env" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python", "install")
    # Of 700 modules this test needs a few.
    options = ("--no-deps", "--ignore-installed", "--no-compile")
    output(*pip, *options, wheel, folder=tmp_path)
    files = output(scripts / "python", "-c", NEW, folder=tmp_path).split()[:2]
    assert all(file.startswith(str(packages)) for file in files)
    (job,) = (tmp_path / "mine").glob("*.toml")
    rounds = ("--set", "rounds=2")
    said = output(scripts / "crossfed", "simulate", job, *rounds, folder=tmp_path)
    assert "completed" in said
    assert [*tmp_path.rglob("report.html")]
