"""``deployment.json`` in a deployment's folder: its owner, launches and clouds."""

from dataclasses import dataclass, replace
from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors
from federation import durable_json
from federation.errors import CorruptObject
from privacy import own_folder

_NAME = "deployment.json"
_DAMAGED = (
    "restore it, or end the nodes with crossfed down --any-owner, which begins a new "
    "one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLaunch:
    """The last launch of a role, and after how long its node ends."""

    role: str
    number: int
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """A cloud's compute service; the file may name another one later."""

    pool: str
    provider: str
    region: str
    project: str
    endpoint: str
    context: str = ""
    namespace: str = ""
    has_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """Who owns a folder, what it has launched, and where."""

    name: str
    owner: str
    launches: tuple[LastLaunch, ...] = ()
    places: tuple[PoolPlace, ...] = ()


def read(folder: Path) -> DeploymentRecord | None:
    """Read the record of a deployment's folder; None if there is none.

    Raises:
        CorruptObject: It is damaged.
        StoreUnavailable: It cannot be read.
    """
    return durable_json.read(folder / _NAME, DeploymentRecord, advice=_DAMAGED)


def write(folder: Path, record: DeploymentRecord) -> None:
    """Write the record of a deployment's folder.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    durable_json.write(folder / _NAME, record)


def adopt(folder: Path, name: str, owner: str) -> None:
    """Have a folder belong to an owner, who has been given it with its numbers.

    For the head in a cluster: its nodes carry the name of the folder that launched it,
    so that a command there finds them as its own.

    Args:
        folder: Folder of the deployment; it is made if there is none.
        name: Name of the deployment.
        owner: Random name of the other folder.

    Raises:
        CorruptObject: Its record is damaged, or belongs to another deployment.
        StoreUnavailable: It cannot be made or written.
    """
    with file_errors("make", folder):
        own_folder.make(folder)
    record = read(folder)
    if record is None:
        record = DeploymentRecord(name=name, owner=owner)
    if record.name != name:
        raise CorruptObject(
            f"{folder} belongs to deployment {record.name!r} and not to {name!r}"
        )
    write(folder, replace(record, owner=owner))
