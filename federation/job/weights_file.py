"""The file of weights that a run starts from: ``model.weights`` in a job.

Like code (``code_files``) it is *pinned* when a job is loaded: the name gets the file's
SHA-256, ``runs/first/model.safetensors@DIGEST``, so that the digest of the job covers
the weights. Only who makes the first model needs the file: sites are sent that model.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from federation.errors import JobError
from federation.job import code_files
from federation.os_errors import os_errors

KEY = "model.weights"
MODEL = "model.safetensors"

_FORM = re.compile(r"(.+?)(?:@([0-9a-f]{64}))?", re.DOTALL)


def pin(document: Any, folder: Path) -> None:
    """Pin the weights that a job's document names, if it names any.

    Args:
        document: Nested mappings, which are changed.
        folder: What the path is relative to; the working folder is looked in as well.

    Raises:
        JobError: There is no such file, or it cannot be read.
    """
    model = document.get("model")
    text = model.get("weights") if isinstance(model, dict) else None
    if not isinstance(text, str) or _split(text)[1]:
        return
    file = _candidates(text, [folder, Path()])[0]
    model["weights"] = f"{text}@{_digest_of(file)}"
    code_files.look_in(folder)


def find(text: str, folder: Path | None = None) -> Path:
    """Find the file that a pinned name means.

    Args:
        text: As in a job that was loaded.
        folder: What it is relative to; by default the folders of
            ``code_files.look_in`` and the working folder.

    Raises:
        JobError: It is not here, is not the one that was pinned, or was not pinned.
    """
    path, digest = _split(text)
    places = [*code_files.places(), Path()] if folder is None else [folder]
    files = _candidates(path, places)
    for file in files:
        if digest == _digest_of(file):
            return file
    raise JobError(
        f"{files[0]} is not the file that the job names (SHA-256 "
        f"{_digest_of(files[0])} here, {digest or 'none'} in the job): bring that file "
        "back, or load the job again",
        key=KEY,
    )


def _split(text: str) -> tuple[str, str]:
    match = _FORM.fullmatch(text)
    return ("", "") if match is None else (match[1], match[2] or "")


def _candidates(path: str, places: Sequence[Path]) -> list[Path]:
    """Files that a path may mean; at least one."""
    if "://" in path:
        raise JobError(
            f"{path} is a URL: copy the file to this machine and name the copy", key=KEY
        )
    found = [place / path for place in places]
    found = [each / MODEL if each.is_dir() else each for each in found]
    files = [each for each in found if each.is_file()]
    if not files:
        tried = " or ".join(dict.fromkeys(str(each.resolve()) for each in found))
        raise JobError(
            f"there is no file {tried}: name a safetensors file, or the folder of a "
            "completed run",
            key=KEY,
        )
    return files


def _digest_of(file: Path) -> str:
    with os_errors(JobError, f"read {file}"), file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
