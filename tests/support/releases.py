"""Another release of crossfed, for a process that finds it first."""

import shutil
from pathlib import Path

import federation


def another_release(folder: Path, version: str) -> dict[str, str]:
    """Make one: other code of one package, under a version of its own.

    Returns:
        The environment of a process that is to run it.
    """
    root = Path(federation.__file__).parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("crossfed", "federation"):  # Packages are taken from beside the first.
        copy = shutil.copytree(root / name, folder / name, ignore=ignored)
    with (copy / "__init__.py").open("a") as code:
        code.write("# Of another release.\n")
    for name in set(federation.OURS) - {"federation"}:
        (folder / name).symlink_to(root / name)
    about = folder / f"crossfed-{version}.dist-info"
    about.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: crossfed\nVersion: {version}\n"
    (about / "METADATA").write_text(metadata)
    return {"PYTHONPATH": str(folder)}
