"""Find the runs of this machine, by folder or name."""

from pathlib import Path

from cloud_adapters.urls import parse_url
from federation.errors import RunNotFound
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder

# Of runs whose checkpoints are in a bucket.
LOCAL_ROOT = Path("runs")

# Files of exported models, and what reads them. A folder for transformers has a
# model.safetensors, too, so the order matters.
_READERS = {
    "adapter_config.json": "load it with peft, on its base model",
    "config.json": "load it with from_pretrained of transformers",
    "model.onnx": "run it with ONNX Runtime",
    "model.gguf": "run it with llama.cpp",
    "model.safetensors": "start a job from it with model.weights; if its job.toml is "
    "beside it, crossfed predict takes it",
}
_OWN_FORMAT = "model.safetensors"


def runs_root(job: JobSpec) -> Path | None:
    """Folder of all runs on this machine; None if the job stores nothing.

    Raises:
        JobError: The job's ``storage.url`` is malformed or unknown.
    """
    url = parse_url(job.storage.url)
    if url.is_remote:
        return LOCAL_ROOT
    return Path(url.place) if url.scheme == "file" else None


def find_runs(root: Path) -> list[RunFolder]:
    """Every run in a folder or one level below; those named by time, oldest first."""
    # With --out a run may be anywhere, and is likely to be right there.
    levels = ("*/events.jsonl", "*/*/events.jsonl")
    found = [RunFolder(path.parent) for level in levels for path in root.glob(level)]
    return sorted(found, key=_by_time)


def _by_time(run: RunFolder) -> tuple[str, str]:
    return run.path.name, str(run.path)


def find_run(name: str, root: Path) -> RunFolder:
    """Find the run with a folder, an id or a job's name.

    Args:
        name: The folder of a run, or of a job's runs for its newest one; a run ID; or
            a job's name, likewise.
        root: Folder of all runs.

    Raises:
        RunNotFound: There is none, or the folder holds an exported model.
    """
    direct = RunFolder(Path(name))
    if direct.exists():
        return direct
    runs = find_runs(root)
    job = root / name
    matches = [run for run in runs if run.path.name == name or run.path.parent == job]
    if not matches and "/" in name:
        there = Path(name).glob("*/events.jsonl")
        matches = sorted((RunFolder(path.parent) for path in there), key=_by_time)
    if not matches:
        if kind := _exported(Path(name)):
            raise RunNotFound(
                f"{name} is a model, not a run ({kind}): {_READERS[kind]}; or give the "
                "run that it was exported from, which its README.md names"
            )
        raise RunNotFound(
            f"there is no run {name!r}: give a run folder, a run id or a job's name "
            f"(`crossfed runs` lists those in {root})"
        )
    return matches[-1]


def find_model(name: str, root: Path) -> RunFolder:
    """Find a run, or a folder that ``crossfed export`` wrote in its own format.

    Such a folder has the run's model and job, but not its record.

    Args:
        name: As for ``find_run``, or the path of the model in the folder.
        root: Folder of all runs.

    Raises:
        RunNotFound: There is neither.
    """
    path = Path(name)
    direct = RunFolder(path.parent if path.name == _OWN_FORMAT else path)
    is_export = _exported(direct.path) == _OWN_FORMAT and direct.job.is_file()
    return direct if is_export or direct.exists() else find_run(name, root)


def _exported(path: Path) -> str:
    """Name of the file that shows an exported model's format; empty without one.

    Args:
        path: A folder, or such a file in it.
    """
    folder = path.parent if path.is_file() and path.name in _READERS else path
    if RunFolder(folder).exists():
        return ""
    return next((file for file in _READERS if (folder / file).is_file()), "")
