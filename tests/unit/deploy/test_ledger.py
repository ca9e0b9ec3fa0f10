"""``crossfed ledger`` says what was spent, and which ledger cannot be believed."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support import event_samples

from deploy.cli import commands as cli
from deploy.tools import ledger_reader as ledger
from federation.clock import VirtualClock
from federation.errors import RunNotFound
from federation.event_log import to_line
from federation.events import RunStarted
from privacy.dp import accountant
from privacy.dp.events import PrivacyEvent
from privacy.dp.ledger import ledger_format
from privacy.dp.ledger.ledger import FileLedger, Terms  # type: ignore[attr-defined]
from privacy.dp.ledger.ledger_files import replace_head

STEP = PrivacyEvent(noise_multiplier=2.0, sampling_rate=0.05, steps=20)
HELD_OUT = PrivacyEvent(noise_multiplier=20.0, sampling_rate=1.0, steps=1)


def terms(site: str) -> Terms:
    return Terms(
        run_id="run-1", site=site, job_digest="ab" * 32, delta=1e-5, epsilon_cap=8
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two sites, of which one released nothing."""
    run = tmp_path_factory.mktemp("run")
    (run / "events.jsonl").write_bytes(b"")
    for site in ("left", "right"):
        kept = FileLedger(run / "sites" / site, terms(site), clock=VirtualClock(1e9))
        for round_index in range(1, 4) if site == "left" else ():
            kept.charge(STEP, round_index=round_index)
            kept.charge(HELD_OUT, round_index=round_index, purpose="evaluate")
        kept.close()
    return run


def show(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(["ledger", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_every_site_of_a_run_is_shown(run: Path, capsys: pytest.CaptureFixture[str]):
    """Epsilon three ways, and all that it means nothing without."""
    code, out, err = show(str(run), capsys=capsys)
    assert (code, err) == (0, "")
    left, right = out.split("\n\n")
    want = accountant.epsilon([STEP] * 3, 1e-5)
    for text in (
        "site        left",
        "sound, 6 entries",
        "unit        record; neighbours: add or remove one",
        "sampling    poisson",
        "delta       1e-05",
        "cap         epsilon 8",
        "train       3 rounds, 3 charges, 60 steps",
        "evaluate    3 rounds, 3 charges, 3 steps",
        f"epsilon   {math.ceil(10_000 * want) / 10_000:.4f} (pld)",
        "60 x Gaussian, noise multiplier 2.0000, sampling rate 0.05",
    ):
        assert text in left
    assert "spent       nothing" in right


def test_a_run_need_not_be_named_if_only_one_has_ledgers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Otherwise those that have are named."""
    for name in ("one", "two"):
        folder = tmp_path / "job" / name / "sites" / "left"
        folder.mkdir(parents=True)
        (folder / "ledger.jsonl").write_text("not a ledger\n")
        code, out, err = show("--root", str(tmp_path), capsys=capsys)
        if name == "one":
            assert code == 1
            assert str(folder) in out
    assert code == 2
    assert "one, two" in err


@pytest.mark.slow
def test_json_has_the_same(run: Path, capsys: pytest.CaptureFixture[str]):
    """Counted afresh, and in order: the bound is above, the estimate is close."""
    code, out, _ = show(str(run / "sites/left"), "--json", capsys=capsys)
    assert code == 0
    document = json.loads(out)
    assert document["damaged"] == 0
    spent = document["ledgers"][0]["spent"]["train"]
    assert spent["epsilon"] == accountant.epsilon([STEP] * 3, 1e-5)
    assert spent["epsilon_rdp"] > spent["epsilon"]
    assert spent["epsilon_prv"] == pytest.approx(spent["epsilon"], rel=0.005)
    assert spent["epsilon_prv_upper"] > spent["epsilon_prv"]


def copy(run: Path, tmp_path: Path) -> Path:
    """A run to spoil."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.mark.slow
def test_one_damaged_ledger_fails_the_whole(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The others are shown all the same."""
    spoiled = copy(run, tmp_path)
    path = spoiled / "sites/left/ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"steps":20', b'"steps":10', 1))
    code, out, _ = show(str(spoiled), capsys=capsys)
    assert code == 1
    assert f"DAMAGED     {path}, line 2: its hash" in out
    assert "sites/right/ledger.jsonl: sound" in out


@pytest.mark.slow
def test_a_false_epsilon_is_damage(tmp_path: Path):
    """Though chain and head are whole: events are counted again."""
    header, digest = ledger_format.header_line(terms("left"), 1e9)
    charge = ledger_format.Charge(
        seq=1,
        round_index=1,
        purpose="train",
        event=STEP,
        time=1e9,
        epsilon_after=0.1,
    )
    line, digest = ledger_format.charge_line(charge, digest)
    (tmp_path / "ledger.jsonl").write_bytes(header + line)
    replace_head(tmp_path, 1, digest)
    found = ledger.examine(tmp_path / "ledger.jsonl")
    assert found.contents is None
    assert "states an epsilon of 0.1 for train" in found.error


def errors(run: Path) -> dict[str, str]:
    """What is wrong with the ledger of each site."""
    found = ledger.find(str(run), run.parent)
    return {path.parent.name: ledger.examine(path).error for path in found}


def test_another_sites_ledger_is_no_sites_own(run: Path, tmp_path: Path):
    """Sound as it is, it does not say what this site has spent."""
    spoiled = copy(run, tmp_path)
    shutil.rmtree(spoiled / "sites" / "right")
    shutil.copytree(spoiled / "sites" / "left", spoiled / "sites" / "right")
    found = errors(spoiled)
    assert found["left"] == ""
    assert "ledger of site 'left': restore that of site 'right'" in found["right"]


def test_another_runs_ledger_is_told(run: Path, tmp_path: Path):
    """By the run that the folder's events are of."""
    spoiled = copy(run, tmp_path)
    started = event_samples.private()[0]
    assert isinstance(started, RunStarted)
    (spoiled / "events.jsonl").write_text(
        to_line(replace(started, run_id="run-2")) + "\n"
    )
    found = errors(spoiled)
    assert "ledger of run run-1, but this is run run-2" in found["left"]
    # A copy that is elsewhere is shown as it is.
    path = Path(shutil.copytree(run / "sites" / "right", tmp_path / "kept"))
    assert ledger.examine(path / "ledger.jsonl").error == ""


def test_a_ledger_that_is_gone_is_told_by_its_head(run: Path, tmp_path: Path):
    """It is not left out as if the site had spent nothing."""
    spoiled = copy(run, tmp_path)
    (spoiled / "sites" / "left" / "ledger.jsonl").unlink()
    found = errors(spoiled)
    assert set(found) == {"left", "right"}
    assert "cannot read the ledger" in found["left"]
    with pytest.raises(RunNotFound, match="there is no ledger"):
        ledger.find(str(spoiled / "sites" / "left" / "ledger.jsonl"), tmp_path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\xff\xfe", "not a ledger line"),
        (b"[", "not a ledger line"),
        (b"{}", "no field 'hash'"),
        (b"[1]", "not an object"),
    ],
)
def test_what_is_no_ledger_is_told_in_words(
    run: Path, tmp_path: Path, line: bytes, text: str
):
    """And not in those of a parser."""
    path = copy(run, tmp_path) / "sites" / "left" / "ledger.jsonl"
    path.write_bytes(line + b"\n")
    error = ledger.examine(path).error
    assert f"{path}, line 1: " in error
    assert text in error
    assert "the ledger was changed" in error


def test_a_run_without_ledgers_is_said_to_have_none(tmp_path: Path):
    """Perhaps its job asks for no differential privacy."""
    (tmp_path / "events.jsonl").write_bytes(b"")
    with pytest.raises(RunNotFound, match="has no ledger"):
        ledger.find(str(tmp_path), tmp_path)
    with pytest.raises(RunNotFound, match="there is no run 'nowhere'"):
        ledger.find("nowhere", tmp_path)


def test_a_site_is_asked_by_run_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It stores neither jobs nor events: both commands list the IDs that it knows."""
    place = tmp_path / "20260102-030405-abcdef" / "sites" / "east"
    place.mkdir(parents=True)
    (place / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(RunNotFound, match="20260102-030405-abcdef"):
        ledger.find("quickstart", tmp_path)
    assert ledger.find(place.parents[1].name, tmp_path) == [place / "ledger.jsonl"]
    assert cli.main(["runs", "--root", str(tmp_path)]) == 0
    assert "20260102-030405-abcdef" in capsys.readouterr().err
