"""A run, or the folder of an exported model that somebody takes for one."""

from pathlib import Path

import pytest

from federation.errors import RunNotFound
from monitoring.runs.find import find_model, find_run


def folder_with(path: Path, *files: str) -> Path:
    path.mkdir()
    for name in files:
        (path / name).touch()
    return path


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["config.json", "model.safetensors", "job.toml"], "from_pretrained"),
        (["adapter_config.json", "adapter_model.safetensors"], "peft"),
        (["model.onnx", "job.toml"], "ONNX Runtime"),
        (["model.gguf"], r"llama\.cpp"),
        (["model.safetensors"], r"model\.weights"),
    ],
)
def test_an_exported_model_is_no_run(tmp_path: Path, files: list[str], said: str):
    """The message names what reads it, also for the path of its file."""
    folder = folder_with(tmp_path / "given", *files)
    for name in (folder, folder / files[0]):
        for find in (find_run, find_model):
            with pytest.raises(RunNotFound, match=f"not a run.*{said}"):
                find(str(name), tmp_path / "runs")


def test_only_an_export_with_its_job_stands_for_a_run(tmp_path: Path):
    """Verbs that read a run's record refuse it."""
    folder = folder_with(tmp_path / "given", "model.safetensors", "job.toml")
    for name in (folder, folder / "model.safetensors"):
        assert find_model(str(name), tmp_path).path == folder
    with pytest.raises(RunNotFound, match="crossfed predict takes it"):
        find_run(str(folder), tmp_path)


def test_other_files_of_a_folder_are_no_model(tmp_path: Path):
    """And a folder that has the record of a run is one."""
    folder = folder_with(tmp_path / "mine", "config.json", "rings.toml")
    with pytest.raises(RunNotFound, match="there is no run"):
        find_run(str(folder / "rings.toml"), tmp_path / "runs")
    run = folder_with(tmp_path / "run", "events.jsonl", "job.toml", "model.safetensors")
    assert find_model(str(run), tmp_path).path == run
