"""The first program in the pod of a head: it writes what ``crossfed up`` reads there.

``python -m deploy.fleet.in_cluster.head_files BUNDLE FOLDER``. Keys, runs and the
record of launches on the volume are from pods before; only files of the bundle change.
"""

import sys
from pathlib import Path

from deploy.fleet import deployment_record
from deploy.fleet.in_cluster.bundle import FILE, FOLDER, JOB, HeadBundle
from federation import durable_files, durable_json
from federation.errors import CorruptObject, FederationError


def write(given: Path, folder: Path) -> None:
    """Write the files of a bundle.

    Args:
        given: The bundle.
        folder: Folder of the head.

    Raises:
        CorruptObject: The bundle or the volume's record is damaged, or the volume
            belongs to another deployment.
        StoreUnavailable: The volume is full or cannot be written.
    """
    bundle = durable_json.read(given, HeadBundle, advice="run crossfed up again")
    if bundle is None:
        raise CorruptObject(f"{given} is missing: run crossfed up again")
    deployment_record.adopt(folder / FOLDER, bundle.name, bundle.owner)
    for name, text in ((JOB, bundle.job), (FILE, bundle.deployment)):
        durable_files.replace_file(folder / name, [text.encode()])


def main(arguments: list[str]) -> None:
    """Write the files, or say why not."""
    try:
        write(Path(arguments[0]), Path(arguments[1]))
    except FederationError as error:
        sys.exit(f"crossfed: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
