"""Users' code by file: ``./my_model.py:net`` in a job.

When a job is loaded, each such name is *pinned*: it gets the digest of the file and of
all that the file imports with a dot, ``./my_model.py@DIGEST:net``. So the digest of a
job covers this code. Every party has the file itself, in a folder of its own, and loads
it only if it has that digest. No code travels.
"""

import ast
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from federation.errors import JobError, os_errors

# Folders in which this process and its children look for such files.
FOLDERS = "CROSSFED_CODE"

# Keys whose functions the aggregator alone calls.
AGGREGATORS = ("aggregation.combine", "schedule.sampling")

_FORM = re.compile(r"((?:\.{1,2}/|/)[^@:\0]*\.py)(?:@([0-9a-f]{64}))?:([A-Za-z_]\w*)")

# Their texts are names of runs, columns, categories and classes, which nothing imports.
_DATA = (
    *("statistics", "training.moments"),
    *("training.standardise", "training.inputs", "training.classes"),
)

Sources = Mapping[str, tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A function in a user's file.

    Attributes:
        path: The file, relative to the job file unless it begins with a slash.
        digest: SHA-256 of its code in hexadecimal; empty until it is pinned.
        function: Name of the function in it.
    """

    path: str
    digest: str
    function: str

    def __str__(self) -> str:
        """As in a job."""
        return f"{self.path}{self.digest and '@'}{self.digest}:{self.function}"

    @property
    def module(self) -> str:
        """Name of the module that the file is."""
        return self.path.rpartition("/")[2].removesuffix(".py")

    def sources(self, folder: Path | None = None) -> Sources:
        """Read the file, and all files that it imports with a dot.

        Args:
            folder: What ``path`` is relative to; by default the folders of
                ``look_in``, or the working folder if there are none.

        Returns:
            Path and content by the name of the module, relative to the file's folder.

        Raises:
            JobError: There is no such file, it is not Python, or it is not the code
                that was pinned.
        """
        folders = [folder] if folder else places()
        files = [file for p in folders if (file := p / self.path).is_file()]
        if not files:
            fault = f"there is no file {self.path}"
            where = " or ".join(str(place.resolve()) for place in folders)
            raise JobError(f"{fault} in {where}", outside=fault)
        for file in files:
            found = _sources(file)
            if self.digest in {"", digest_of(found)}:
                return found
        raise JobError(
            f"{files[0]} has changed since the job was loaded, or differs from the "
            f"file of the job's author (SHA-256 {digest_of(found)} here, "
            f"{self.digest} in the job): give all parties the same code, or load the "
            "job again",
            outside=f"{self.path} is not the file that the job names",
        )


def parse(text: str) -> CodeFile | None:
    """Parse the name of a function in a file; None if it is not one."""
    match = _FORM.fullmatch(text)
    return None if match is None else CodeFile(match[1], match[2] or "", match[3])


def unpinned(text: str) -> str:
    """Return the name of a function as written in the job file."""
    file = parse(text)
    return text if file is None else str(replace(file, digest=""))


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a job's document, keys of tables too, with the keys they are at.

    What is pinned and what a site's policy is asked about are both found here, so that
    no name of a function is seen by one of them alone.
    """
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            place = f"{key}.{name}".lstrip(".")
            if place in _DATA:
                continue
            if isinstance(name, str):
                yield key, name
            yield from texts(inner, place)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from texts(inner, f"{key}[{index}]")


def pin(document: dict[str, Any], folder: Path) -> None:
    """Pin all names of functions in files in a job's document.

    Args:
        document: Nested mappings, which are changed.
        folder: What their paths are relative to.

    Raises:
        JobError: There is no such file, or it is not Python.
    """
    names = dict[str, str]()
    for key, text in texts(document):
        file = parse(text)
        if file is None or file.digest:
            continue
        try:
            found = digest_of(file.sources(folder))
        except JobError as error:
            if ".options." in f".{key}.":  # An option may be any text.
                continue
            advice = ": put it there, and to deploy the job beside aggregator.toml and "
            advice = "" if (folder / file.path).is_file() else f"{advice}each site.toml"
            raise JobError(f"{error.reason}{advice}", key=key) from error
        names[text] = str(replace(file, digest=found))
    if names:
        _rename(document, names)
        look_in(folder)


def _rename(value: Any, names: Mapping[str, str]) -> Any:
    """Replace texts and keys in mappings and lists, which are changed."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        entries = [(names.get(k, k), _rename(v, names)) for k, v in value.items()]
        value.clear()
        value.update(entries)
    elif isinstance(value, list):
        value[:] = [_rename(each, names) for each in value]
    elif isinstance(value, tuple):
        return tuple(_rename(each, names) for each in value)
    return value


def check_present(document: Mapping[str, Any], folder: Path) -> None:
    """Check that a folder has all files that a job names, as they were pinned.

    Args:
        document: A job's document.
        folder: What their paths are relative to.

    Raises:
        JobError: One is missing, or differs; the message says where it belongs.
    """
    for key, text in texts(document):
        file = parse(text)
        if file is None or not file.digest:
            continue
        try:
            file.sources(folder)
        except JobError as error:
            places = "aggregator.toml"
            places += "" if key in AGGREGATORS else " and each site.toml"
            advice = f"put the file beside {places}"
            raise JobError(f"{error.reason}: {advice}", key=key) from error


def look_in(folder: Path) -> None:
    """Look for files of users in a folder, in this process and in its children."""
    known = places() if os.environ.get(FOLDERS) else []
    found = dict.fromkeys(map(str, [folder.resolve(), *known]))
    os.environ[FOLDERS] = os.pathsep.join(found)


def places() -> list[Path]:
    """Folders of ``look_in``; without any, the working folder."""
    return [Path(p) for p in os.environ.get(FOLDERS, ".").split(os.pathsep)]


def digest_of(sources: Sources) -> str:
    """Return SHA-256 over names and contents of modules, in hexadecimal."""
    whole = hashlib.sha256(b"crossfed/user-code\0")
    for name in sorted(sources):
        whole.update(hashlib.sha256(name.encode()).digest())
        whole.update(hashlib.sha256(sources[name][1]).digest())
    return whole.hexdigest()


def _sources(file: Path) -> Sources:
    folder, found = file.parent, dict[str, tuple[str, bytes]]()
    waiting = [file.name]
    if (folder / "__init__.py").is_file():
        waiting.append("__init__.py")
    while waiting:
        inside = waiting.pop()
        path = folder / inside
        with os_errors(JobError, f"read {path}"):
            content = path.read_bytes()
        parts = inside.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        package = parts[:-1]
        name = ".".join(package if is_package else parts)
        if name in found:
            continue
        found[name] = (str(path), content)
        try:
            tree = ast.parse(content, str(path))
        except (SyntaxError, ValueError) as error:
            raise JobError(f"this is not Python: {error}") from error
        waiting += _imports(tree, package, folder)
    return found


def _imports(tree: ast.Module, package: list[str], folder: Path) -> Iterator[str]:
    """Files that a module may import with a dot, those of packages on the way too."""
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.ImportFrom)
            or not 0 < node.level <= len(package) + 1
        ):
            continue
        base = package[: len(package) + 1 - node.level]
        base += node.module.split(".") if node.module else []
        for name in ("", *(alias.name for alias in node.names)):
            parts = [*base, name] if name else base
            for depth in range(1, len(parts) + 1):
                stem = "/".join(parts[:depth])
                for candidate in (f"{stem}/__init__.py", f"{stem}.py"):
                    if (folder / candidate).is_file():
                        yield candidate
                        break
