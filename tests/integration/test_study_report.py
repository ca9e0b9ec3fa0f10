"""The study of thin lines computes shares of time, and writes its page from rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import ForkServer

REPOSITORY = Path(__file__).parents[2]
THIN_LINES = REPOSITORY / "studies" / "thin_lines"
PAGE = Path("docs/explanation/thin-lines.md")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the short form of the script prints."""
    server = ForkServer(tmp_path_factory.mktemp("server"))
    script = THIN_LINES / "utilisation.py"
    done = server.run("--smoke", folder=REPOSITORY, script=script)
    assert done.code == 0, done.stderr
    _, *found = (json.loads(line) for line in done.stdout.splitlines())
    return found


@pytest.mark.long
def test_model_of_time_is_that_of_the_virtual_engine(rows: list[dict[str, Any]]):
    """To a thousandth: a header's text may differ by 64 bytes from the longest one."""
    engine = [row for row in rows if row["part"] == "virtual" and "predicted" in row]
    assert len(engine) == 12
    for row in engine:
        assert row["round_seconds"] == pytest.approx(row["predicted"], rel=1e-3), row


def write_page(server: ForkServer, folder: Path, *arguments: str) -> None:
    words = ("--to", str(folder), *arguments)
    done = server.run(*words, folder=folder, script=THIN_LINES / "report.py")
    assert done.code == 0, done.stderr


def test_page_follows_from_its_rows(server: ForkServer, tmp_path: Path):
    """It is what the script writes, and so are its pictures."""
    write_page(server, tmp_path)
    assert (tmp_path / PAGE).read_text() == (REPOSITORY / PAGE).read_text()
    pictures = {p.name: p for p in (tmp_path / "docs/images").iterdir()}
    assert {"thin-lines-utilisation-billion.svg"} <= pictures.keys()
    for name, path in pictures.items():
        committed = REPOSITORY / "docs/images" / name
        assert path.read_text() == committed.read_text(), name


def test_page_without_rows_says_how_to_get_them(server: ForkServer, tmp_path: Path):
    """No figure stands where nothing was measured."""
    nothing = str(tmp_path / "none.jsonl")
    names = ("loss", "warm", "baselines", "utilisation")
    options = [word for name in names for word in (f"--{name}", nothing)]
    write_page(server, tmp_path, *options)
    text = (tmp_path / PAGE).read_text()
    for script in ("measure", "baselines", "utilisation"):
        assert f"`python studies/thin_lines/{script}.py` measures them" in text
    assert "`python studies/thin_lines/measure.py --size warm` measures them" in text
    assert list((tmp_path / "docs/images").iterdir()) == []
