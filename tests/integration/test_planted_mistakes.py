"""A user's own mistake is found from what is said of it, and from nothing else."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from support import planted_mistakes
from support.without_report import simulate

from deploy.cli import commands
from federation.errors import QuorumNotMet
from federation.job import job_file

HERE = "support.planted_mistakes"
SECURE = {
    "secure_aggregation": {
        "enabled": True,
        "clip_norm": 5.0,
        "max_examples": 100,
        "two_sites_waiver": True,
    }
}
PRIVATE = {
    "differential_privacy": {"unit": "record", "target_epsilon": 8.0},
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "secure": SECURE,
    "private": PRIVATE,
}


def planted(name: str) -> str:
    """File and line of a mistake."""
    source = Path(planted_mistakes.__file__).read_text().splitlines()
    line = 1 + next(i for i, t in enumerate(source) if t.endswith(f"# here: {name}"))
    return f"planted_mistakes.py, line {line}"


# What is wrong, in model, data or training; and what must be said of it.
MISTAKES: Mapping[str, tuple[dict[str, Any], list[str]]] = {
    "misspelt": ({"model": "misspelt"}, ["'layr'", planted("misspelt")]),
    "narrow": (
        {"model": "narrow"},
        [planted("narrow"), "model.factory", "torch.float32 (8, 4)"],
    ),
    "gap": ({"data": "items", "kind": "gap"}, ["KeyError", planted("gap")]),
    "objective": ({"task": "objective"}, ["IndexError", planted("objective")]),
    "images": (
        {"data": "images", "model": "convolution"},
        ["torch.int64 (8, 1, 4, 4)", "x / 255"],
    ),
    "lists": ({"data": "items", "kind": "lists"}, ["as a list", "make it an array"]),
    "float_targets": ({"data": "float_targets"}, ["make the targets integers"]),
    "far_class": ({"data": "far_class"}, ["from 0 to 2", "from 0 to 7"]),
    "not_a_number": ({"data": "not_a_number"}, ["training record 14 holds NaN"]),
    "detached": ({"model": "detached"}, ["the loss has no gradient", "model.factory"]),
    "ragged": (
        {"data": "items", "kind": "ragged"},
        ["record 5 is ndarray[5]", "__getitem__"],
    ),
}
# These show before the first round.
BEFOREHAND: Mapping[str, tuple[dict[str, Any], list[str]]] = {
    "lazy": ({"model": "lazy"}, ["model.factory: '0.weight'", "lazy layers"]),
    "changing": ({"model": "changing"}, ["model.factory", "second model", "'weight'"]),
    "no_file": ({"data": "no_file"}, ["FileNotFoundError", 'planted_mistakes.py"']),
}
SOFTMAX = ({"model": "probabilities"}, ["model.factory", "remove the softmax"])


def document(mistake: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A job of two sites with a mistake in it."""
    options = {"kind": mistake["kind"]} if "kind" in mistake else {}
    task = {}
    if "task" in mistake:
        bounds = {"hits": [0.0, 1.0], "loss": [0.0, 10.0]}
        task = {"task": f"{HERE}:{mistake['task']}", "metrics": bounds}
    weights = {"aggregation": {"weights": "uniform"}} if privacy is PRIVATE else {}
    return {
        "name": "mistaken",
        "rounds": 1,
        "model": {"factory": f"{HERE}:{mistake.get('model', 'model')}"},
        "data": {
            "source": f"{HERE}:{mistake.get('data', 'points')}",
            "options": options,
        },
        "training": {
            "local_steps": 6,
            "batch_size": 8,
            "optimizer": {"lr": 0.1},
            **task,
        },
        "sites": [{"name": "left"}, {"name": "right"}],
        "privacy": privacy,
        **weights,
    }


@pytest.mark.parametrize("name", [*MISTAKES, *BEFOREHAND, "softmax"])
def test_check_job_finds_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Without a run, with file and line or key, and which site."""
    cases = {**MISTAKES, **BEFOREHAND, "softmax": SOFTMAX}
    mistake, expected = cases[name]
    file = tmp_path / "job.toml"
    file.write_text(tomli_w.dumps(document(mistake, {})))
    assert commands.main(["check-job", str(file)]) == 2
    streams = capsys.readouterr()
    assert "the job is sound" not in streams.out
    for text in expected if name in BEFOREHAND else [*expected, "site '", HERE]:
        assert text in streams.err


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        # All are found by the same first batches, as above.
        *((name, "plain") for name in ("narrow", "gap", "ragged")),
        *((name, "secure") for name in ("misspelt", "objective", "not_a_number")),
    ],
)
def test_simulation_shows_it_at_once_and_at_the_end(
    name: str, setting: str, tmp_path: Path
):
    """A single round is enough; what user code said is in no file of a secure run."""
    mistake, expected = MISTAKES[name]
    job = job_file.parse(document(mistake, SETTINGS[setting]))
    shown: list[tuple[str, str]] = []

    def show(place: str, error: Exception) -> None:
        shown.append((place, "".join(traceback.format_exception(error))))

    with pytest.raises(QuorumNotMet) as caught:
        simulate(job, folder=tmp_path / "run", show_failure=show)
    ((place, whole),) = shown
    assert "round 1" in place
    for text in expected:
        assert text in str(caught.value)
    if any("line" in text for text in expected):
        assert caught.value.__cause__ is not None
        assert "# here: " + name in whole
    kept = [f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()]
    assert kept
    if setting == "secure":
        assert not any(expected[-1].encode() in data for data in kept)


def test_private_simulation_keeps_the_words_of_user_code(tmp_path: Path):
    """They may quote a record: they are shown, and are in no file of the run."""
    job = job_file.parse(document({"model": "misspelt"}, PRIVATE))
    with pytest.raises(QuorumNotMet, match="layr"):
        simulate(job, folder=tmp_path / "run", show_failure=lambda *_: None)
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or b"layr" not in file.read_bytes()


@pytest.mark.parametrize("verbose", [False, True])
def test_terminal_shows_the_users_lines(
    verbose: bool,  # noqa: FBT001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Their last frames; every frame with ``-v``."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(tomli_w.dumps(document({"model": "misspelt"}, SECURE)))
    assert commands.main(["simulate", "job.toml", *["-v"] * verbose]) == 1
    said = capsys.readouterr().err
    shown, _, _ = said.partition("failed 1/1")
    assert "return self.layr(x)  # here: misspelt" in shown
    assert "AttributeError: '_Misspelt' object has no attribute 'layr'" in shown
    assert ("site.py" in shown) == verbose
    last = said.rstrip().splitlines()[-1]
    assert planted("misspelt") in last
    assert "'layr'" in last


def test_code_named_by_file_is_shown_as_the_job_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Without the digest that the name is extended with when the job is loaded."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\n\ndef points():\n"
        "    x, y = np.ones((40, 4), np.float32), np.ones(40)\n"
        "    return (x[:30], y[:30]), (x[30:], y[30:])\n"
    )
    table = document({}, {})
    table["data"] = {"source": "./mine.py:points"}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(table))
    assert commands.main(["check-job", str(tmp_path / "job.toml")]) == 2
    said = capsys.readouterr().err
    assert "site 'left', data './mine.py:points': classification needs" in said


def test_sound_job_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With privacy of records, too, whose steps are taken in the clear here."""
    for privacy in SETTINGS.values():
        file = tmp_path / "job.toml"
        file.write_text(tomli_w.dumps(document({}, privacy)))
        assert commands.main(["check-job", str(file)]) == 0
        assert capsys.readouterr().out.endswith("the job is sound\n")


def test_check_job_finds_a_model_that_mixes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With privacy of records, before the first round."""
    table = document({}, PRIVATE)
    table["model"] = {"factory": "support.users_module:mixing_network"}
    file = tmp_path / "job.toml"
    file.write_text(tomli_w.dumps(table))
    assert commands.main(["check-job", str(file)]) == 2
    assert "batch has other records" in capsys.readouterr().err
