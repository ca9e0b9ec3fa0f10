"""Write into a wheel which files its dependencies are: for machines of clouds.

    python tools/pin_files.py WHEEL

Adds `crossfed/requirements/base.txt`, and a file for each extra with what it needs
besides: the versions of `constraints.txt`, with the SHA-256 of each file that the
package index has of them. Machines install no other files, and the wheel's own digest
pins the list. Needs `uv` and the index.
"""

import hashlib
import subprocess
import sys
import tomllib
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

_ROOT = Path(__file__).parents[1]
_FOLDER = "crossfed/requirements"
_COMPILE = (
    *("pip", "compile", "--quiet", "--generate-hashes", "--universal"),
    *("--no-annotate", "--no-header", "--python-version", "3.11"),
    # Building a source archive would fetch and run files that nobody has pinned.
    *("--only-binary", ":all:", "--constraint", "constraints.txt", "pyproject.toml"),
)


def pinned() -> Mapping[str, str]:
    """Texts of the files, by their names in a wheel; the index is asked."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    base = _blocks()
    found = {"base": base}
    for extra in project["optional-dependencies"]:
        more = _blocks("--extra", extra)
        found[extra] = [block for block in more if block not in base]
    return {f"{_FOLDER}/{name}.txt": "".join(each) for name, each in found.items()}


def _blocks(*options: str) -> list[str]:
    """One text for each requirement: its version, and its hashes in further lines."""
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), *_COMPILE, *options]
    done = subprocess.run(  # noqa: S603 -- words of this file
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    blocks: list[str] = []
    for line in done.stdout.splitlines(keepends=True):
        if line.startswith(" "):
            blocks[-1] += line
        else:
            blocks.append(line)
    return blocks


def add(wheel: Path, files: Mapping[str, str]) -> None:
    """Put files into a wheel, and into its list of what it has (PEP 427)."""
    made = wheel.with_suffix(".new")
    with ZipFile(wheel) as old, ZipFile(made, "w", ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data += "".join(map(_row, files, files.values())).encode()
            new.writestr(item, data)
        for name, text in files.items():
            new.writestr(name, text)
    made.replace(wheel)


def _row(name: str, text: str) -> str:
    data = text.encode()
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\n"


if __name__ == "__main__":
    add(Path(sys.argv[1]), pinned())
