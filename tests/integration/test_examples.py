"""The examples that `crossfed new --from` copies work as copied."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import crossfed
from deploy.cli import commands
from deploy.cli.new_verb import example_names
from monitoring.runs.run_result import RunResult

# What each page shows, with a margin for other versions of torch.
REACHED: dict[str, Callable[[RunResult], bool]] = {
    "multimodal": lambda result: result.accuracy > 0.75,
    "recommender": lambda result: result.metrics["recall_at_10"] > 0.4,
    "resnet": lambda result: result.accuracy > 0.95,
    "segmentation": lambda result: result.metrics["mean_iou"] > 0.75,
    "tabular": lambda result: result.metrics["auc"] > 0.99,
}


def copied(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is the working folder and where modules are found."""
    assert commands.main(["new", "--from", example, str(folder)]) == 0
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for file in folder.glob("*.py"):  # Another example has modules of these names.
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("example", example_names())
def test_an_example_passes_its_own_tests(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(example, tmp_path / "mine", monkeypatch)
    spec = importlib.util.spec_from_file_location("test_work", folder / "test_work.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [test for name, test in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        uses_a_folder = "tmp_path" in inspect.signature(test).parameters
        test(**({"tmp_path": tmp_path} if uses_a_folder else {}))


@pytest.mark.long
@pytest.mark.parametrize("example", example_names())
def test_an_example_reaches_what_its_page_says(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(example, tmp_path / "mine", monkeypatch)
    assert REACHED[example](crossfed.simulate(folder / "job.toml"))
