"""What the aggregator keeps for machines that enrol by themselves.

``machines/SITE.json``: what the machine sent, with the proof of its cloud; the operator
of the sites checks it before signing a roster. ``roster.signature``: that signature,
which the aggregator passes on.
"""

from dataclasses import dataclass
from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors
from federation import durable_files
from privacy import own_folder
from privacy.membership.messages import MAX_MESSAGE_BYTES
from privacy.secagg.agreement.roster import Roster
from privacy.secret_files import replace_private

_REQUESTS, _SIGNATURE = "machines", "roster.signature"
_ADVICE = "remove it, and run crossfed up again, which signs the roster again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterSignature:
    """An operator's signature of a roster.

    Attributes:
        digest: Digest of the roster, hexadecimal.
        signature: Hexadecimal.
    """

    digest: str
    signature: str


def keep(folder: Path, site: str, body: bytes) -> None:
    """Keep what a machine sent; the caller holds the lock of the book.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    path = _request_file(folder, site)
    with file_errors("write", path):
        own_folder.make(path.parent)
        replace_private(path, body)


def kept(folder: Path, site: str) -> bytes | None:
    """What a site's machine sent last; None if none has.

    Raises:
        StoreUnavailable: It cannot be read.
    """
    path = _request_file(folder, site)
    with file_errors("read", path):
        if not path.exists():
            return None
        with path.open("rb") as file:
            return file.read(MAX_MESSAGE_BYTES + 1)


def keep_signature(folder: Path, roster: Roster, signature: str) -> None:
    """Have the aggregator pass a signature on.

    Raises:
        StoreUnavailable: It cannot be written.
    """
    found = RosterSignature(digest=roster.digest.hex(), signature=signature)
    durable_files.write_json(folder / _SIGNATURE, found)


def signature_of(folder: Path, roster: Roster) -> str:
    """The signature of a roster, hexadecimal; empty if it has none.

    Raises:
        CorruptObject: The file is damaged.
    """
    path = folder / _SIGNATURE
    found = durable_files.read_json(path, RosterSignature, advice=_ADVICE)
    is_it = found is not None and found.digest == roster.digest.hex()
    return found.signature if found is not None and is_it else ""


def _request_file(folder: Path, site: str) -> Path:
    return folder / _REQUESTS / f"{site}.json"
