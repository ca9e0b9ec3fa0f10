"""``crossfed new``: a project to start from."""

import argparse
import shlex
from importlib import resources

from deploy.cli.terminal import say, say_json
from deploy.exit_codes import DONE
from federation.errors import JobError
from federation.ids import check_name
from federation.os_errors import os_errors

_FILES = ("README.md", "job.toml", "work.py", "test_work.py")


def _new(options: argparse.Namespace) -> int:
    folder = options.folder
    try:
        name = check_name(folder.resolve().name)
    except ValueError as error:
        raise JobError(str(error)) from error
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobError(f"{folder} exists and is not empty: choose a new folder")
    templates = resources.files("deploy.cli") / "project"
    with os_errors(
        JobError, f"create {folder}", "choose a folder that you can write to"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for file in _FILES:
            # Python in a package would count as a part of it.
            text = (templates / f"{file}.txt").read_text(encoding="utf-8")
            (folder / file).write_text(text.replace("NAME", name), encoding="utf-8")
    if options.json:
        say_json({"folder": str(folder), "files": _FILES})
        return DONE
    say(f"created {folder}: {', '.join(_FILES)}")
    say(f"next: cd {shlex.quote(str(folder))} && crossfed simulate job.toml")
    return DONE


VERBS = {"new": _new}
