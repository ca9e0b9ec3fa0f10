"""``crossfed new``: a project to start from, or a copy of an example."""

import argparse
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from deploy.cli.terminal import say, say_json
from deploy.exit_codes import DONE
from federation.errors import JobError, os_errors
from federation.ids import check_name

_FILES = ("README.md", "job.toml", "work.py", "test_work.py")
_COPIED = (".md", ".py", ".toml")  # Of an example: no bytecode, and no runs.


def example_names() -> list[str]:
    """Names of the examples that ``--from`` copies."""
    return sorted(e.name for e in _examples().iterdir() if (e / "job.toml").is_file())


def project_files(example: str | None, name: str) -> Mapping[str, str]:
    """Text of each file of a new project, by file name.

    Args:
        example: Name of an example; None for the small project of ``work.py.txt``.
        name: Name of the job. Further jobs of an example have it before their own.

    Raises:
        JobError: There is no such example.
    """
    if example is None:
        folder = resources.files("deploy.cli") / "project"
        # Python in a package would count as a part of it.
        texts = {f: (folder / f"{f}.txt").read_text(encoding="utf-8") for f in _FILES}
        return {file: text.replace("NAME", name) for file, text in texts.items()}
    known = example_names()
    if example not in known:
        near = get_close_matches(example, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise JobError(
            f"there is no example {example!r:.80}: {meant}The examples are "
            f"{', '.join(known)}"
        )
    files = sorted((_examples() / example).iterdir(), key=lambda file: file.name)
    return {
        file.name: _renamed(file, example, name)
        for file in files
        if file.name.endswith(_COPIED)
    }


def _renamed(file: Traversable, example: str, name: str) -> str:
    """Text of a file, whose job gets the project's name."""
    text = file.read_text(encoding="utf-8")
    if not file.name.endswith(".toml"):
        return text
    return text.replace(f'name = "{example}', f'name = "{name}', 1)


def _examples() -> Traversable:
    return resources.files("deploy.cli") / "examples"


def _new(options: argparse.Namespace) -> int:
    if options.list:
        return _list(as_json=options.json)
    folder: Path | None = options.folder
    if folder is None:
        raise JobError("name the new folder, for example: crossfed new my-federation")
    try:
        name = check_name(folder.resolve().name)
    except ValueError as error:
        raise JobError(str(error)) from error
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JobError(f"{folder} exists and is not empty: choose a new folder")
    files = project_files(options.example, name)
    with os_errors(
        JobError, f"create {folder}", "choose a folder that you can write to"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    if options.json:
        say_json({"folder": str(folder), "files": [*files]})
        return DONE
    say(f"created {folder}: {', '.join(files)}")
    say(f"next: cd {shlex.quote(str(folder))} && crossfed simulate job.toml")
    return DONE


def _list(*, as_json: bool) -> int:
    """Print each example with the title of its page."""
    titles = {}
    for name in example_names():
        page = (_examples() / name / "README.md").read_text(encoding="utf-8")
        titles[name] = page.partition("\n")[0].removeprefix("# ")
    if as_json:
        say_json({"examples": titles})
        return DONE
    width = max(map(len, titles))
    for name, title in titles.items():
        say(f"{name:<{width}}  {title}")
    return DONE


VERBS = {"new": _new}
