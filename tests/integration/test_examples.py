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
    "bert": lambda result: result.loss < 5.8,  # Of 512 words alike: 6.2.
    "gpt": lambda result: result.loss < 2.5,
    "multimodal": lambda result: result.accuracy > 0.75,
    "recommender": lambda result: result.metrics["recall_at_10"] > 0.4,
    "resnet": lambda result: result.accuracy > 0.95,
    "segmentation": lambda result: result.metrics["mean_iou"] > 0.75,
    "tabular": lambda result: result.metrics["auc"] > 0.99,
}


# peft asks transformers by an old name; their imports take seconds.
HUGGING_FACE = (
    pytest.mark.xdist_group("huggingface"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
)
# They take half a minute.
_MARKS = {"bert": (*HUGGING_FACE, pytest.mark.long), "gpt": pytest.mark.long}
every_example = pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=HUGGING_FACE if name == "bert" else ())
        for name in example_names()
    ],
)


def copied(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is the working folder and where modules are found."""
    if example == "bert":
        pytest.importorskip("peft", reason="needs the extra huggingface")
    assert commands.main(["new", "--from", example, str(folder)]) == 0
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for file in folder.glob("*.py"):  # Another example has modules of these names.
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=_MARKS.get(name, ())) for name in example_names()],
)
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
@every_example
def test_an_example_reaches_what_its_page_says(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(example, tmp_path / "mine", monkeypatch)
    assert REACHED[example](crossfed.simulate(folder / "job.toml"))
