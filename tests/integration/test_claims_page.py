"""The study of the documents' claims runs, and its page follows from its rows."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from support.commands import ForkServer

REPOSITORY = Path(__file__).parents[2]
STUDY = REPOSITORY / "studies" / "seeds" / "study.py"
PAGE = Path("docs/explanation/claims.md")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study puts folders on the path, whose names other studies have, too."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_page_follows_from_its_rows(server: ForkServer, tmp_path: Path):
    done = server.run("--page", "--to", str(tmp_path), folder=tmp_path, script=STUDY)
    assert done.code == 0, done.stderr
    assert (tmp_path / PAGE).read_text() == (REPOSITORY / PAGE).read_text()
    pictures = [*(tmp_path / "docs/images").iterdir()]
    assert len(pictures) == 3
    for path in pictures:
        committed = REPOSITORY / "docs/images" / path.name
        assert path.read_text() == committed.read_text(), path.name


@pytest.mark.long
def test_short_form_runs_every_case_once(server: ForkServer, tmp_path: Path):
    """A finished case is not run again."""
    out = tmp_path / "rows.jsonl"
    words = ("--smoke", "--out", str(out), "--to", str(tmp_path))
    done = server.run(*words, folder=REPOSITORY, script=STUDY)
    assert done.code == 0, done.stderr
    machine, *rows = (json.loads(line) for line in done.stdout.splitlines())
    assert machine["benchmark"] == "claims"
    cases = {row["case"] for row in rows}
    assert cases == {*runpy.run_path(str(STUDY))["scenarios"].CASES}
    assert (tmp_path / PAGE).exists()
    kept = {json.loads(line)["case"] for line in out.read_text().splitlines()}
    assert kept == cases
    again = server.run(*words, folder=REPOSITORY, script=STUDY)
    assert (again.code, len(again.stdout.splitlines())) == (0, 1)
    steps = {
        (row["variant"], row["mbit"]): row["steps"]
        for row in rows
        if row["case"] == "all"
    }
    assert len({*steps.values()}) == 1 < len(steps), "as many steps in every row"


def test_verdicts_compare_ratios_with_ten_percent_of_room():
    verdicts = runpy.run_path(str(STUDY))["verdicts"]
    assert verdicts.at_least(0.92, 1.0) == verdicts.REPRODUCED
    assert verdicts.at_least(0.90, 1.0) == verdicts.REFUTED
    assert verdicts.at_most(1.09, 1.0) == verdicts.REPRODUCED
    assert verdicts.at_most(1.11, 1.0) == verdicts.REFUTED


def test_pictures_of_unequal_sites_follow_from_their_rows(
    server: ForkServer, tmp_path: Path
):
    script = REPOSITORY / "studies" / "unequal_sites" / "study.py"
    done = server.run("--table", "--to", str(tmp_path), folder=tmp_path, script=script)
    assert done.code == 0, done.stderr
    for path in (tmp_path / "docs/images").iterdir():
        committed = REPOSITORY / "docs/images" / path.name
        assert path.read_text() == committed.read_text(), path.name
