"""What only a folder knows to be charged or answered, when its home is ahead of it.

Such a charge was written here and never confirmed, so nothing was released for it. It
counts all the same: the folder may be of a machine that was put back or paused, and a
charge too many is the error that protects records.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from federation.errors import StoreUnavailable
from federation.os_errors import os_errors
from federation.protocols import Clock
from privacy.dp.ledger import ledger_files, ledger_format
from privacy.dp.ledger.ledger import FileLedger
from privacy.dp.ledger.ledger_files import LEDGER_NAME, HeadKey
from privacy.dp.ledger.ledger_format import Contents
from privacy.secret_files import replace_private


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCharges:
    """A file of a folder, before the home's replaced it.

    Attributes:
        path: Where.
        contents: Contents of a ledger; None if it is a number of a round.
        answered: The round.
    """

    path: Path
    contents: Contents | None = None
    answered: int = 0


def charges_below(folder: Path) -> list[LocalCharges]:
    """Read every ledger and round number in a site's folder.

    Raises:
        LedgerDamaged: A ledger cannot be read, so what it has charged is not known.
        StoreUnavailable: A file cannot be read.
    """
    found = []
    for path in sorted((folder / "runs").glob(f"*/sites/*/{LEDGER_NAME}")):
        with os_errors(StoreUnavailable, f"read {path}"):
            data = ledger_files.read_all(path)
        if b"\n" in data:
            contents = ledger_format.read(data, str(path))
            found.append(LocalCharges(path=path, contents=contents))
    for path in sorted((folder / "runs").glob("*/sites/*/rounds/*.round")):
        with contextlib.suppress(ValueError):  # Then the home's replaces it.
            found.append(LocalCharges(path=path, answered=int(path.read_text("ascii"))))
    return found


def charge_again(
    before: list[LocalCharges], *, clock: Clock, head_key: Callable[[], HeadKey]
) -> Iterator[str]:
    """Add to the home's files what only the folder's had; describe each addition.

    Raises:
        PrivacyError: A ledger of the home cannot be opened.
        StoreUnavailable: A file cannot be written.
    """
    for each in before:
        if each.contents is None:
            with (
                os_errors(StoreUnavailable, f"write {each.path}"),
                contextlib.suppress(ValueError),  # The run says what is wrong with it.
            ):
                if int(each.path.read_text("ascii")) < each.answered:
                    replace_private(each.path, f"{each.answered}\n".encode())
            continue
        now = ledger_files.read_file(each.path)
        known = set(now.hashes)
        charges = [
            charge
            for charge in each.contents.charges
            if each.contents.hashes[charge.seq] not in known
        ]
        if not charges:
            continue
        with contextlib.closing(
            FileLedger(each.path.parent, now.terms, clock=clock, key=head_key())
        ) as ledger:
            for charge in charges:
                ledger.restore(charge.event, purpose=charge.purpose, count=1)
        yield (
            f"{each.path}: counted {len(charges)} charges of this machine again that "
            "its home did not know"
        )
