"""Read a transcript: what every message shows, and what it hides.

``cloud_adapters.local.transcript`` writes it. The reader believes no line of the index:
every frame is decoded again, and size, digest, site, round and kind are compared.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cloud_adapters.local.transcript import FROM, INDEX, TO, kind_of
from deploy.tools import transcript_bodies
from federation.errors import (
    CorruptObject,
    ObjectNotFound,
    ProtocolError,
    WireError,
)
from federation.messages import (
    MaskedUpdate,
    RoundTask,
    SecureAnswer,
    SecureTask,
    SiteUpdate,
)
from federation.wire import frame as wire, wire_fields
from federation.wire.frame import WireMessage
from privacy.secagg.agreement.contract import SUITE

_COLUMNS = frozenset(
    {"sequence", "file", "direction", "site", "round", "kind", "step", "bytes"}
    | {"sha256"}
)

_PROTOCOL = "protocol bytes: public keys, signatures, sealed shares"
_UPDATE = "this site's own model, UNMASKED"
_SUM = "the last opened sum, from which the site computes the model"

# What a section holds, and whether it can be read.
_SECTIONS: Mapping[tuple[type[WireMessage], str], tuple[str, bool]] = {
    (RoundTask, "weights_d"): ("the global model, unmasked", True),
    (RoundTask, "integers_m"): ("the global model's integers, unmasked", True),
    (RoundTask, "secure"): (_PROTOCOL, False),
    (SiteUpdate, "delta_d"): (_UPDATE, True),
    (SiteUpdate, "integers_m"): (_UPDATE, True),
    (MaskedUpdate, "words"): ("the site's update, masked", False),
    (MaskedUpdate, "header_h"): ("the site's sums, masked", False),
    (MaskedUpdate, "body"): (_PROTOCOL, False),
    (SecureTask, "body"): (_PROTOCOL, False),
    (SecureAnswer, "body"): (_PROTOCOL, False),
}


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Every message of a transcript, in order.

    Yields:
        The line of the index, with ``clear``, the fields of the message's header as
        they stand there, and ``sections``: name, type, count, bytes, SHA-256 and
        what each part of the payload holds, with the decoded ``fields`` of a part
        that is a message of secure aggregation.

    Raises:
        ObjectNotFound: There is no transcript in the folder.
        CorruptObject: A file is missing, changed, or not in the index.
    """
    named = {INDEX}
    for sequence, row in enumerate(_rows(folder), start=1):
        if row["sequence"] != sequence:
            raise CorruptObject(
                f"{folder / INDEX}: line {sequence} has number {row['sequence']!r}; "
                "messages were removed or added"
            )
        named.add(str(row["file"]))
        yield row | _content(folder, row)
    others = sorted(path.name for path in folder.iterdir() if path.name not in named)
    if others:
        raise CorruptObject(
            f"{folder / others[0]} is not in the index: the run was interrupted there, "
            "or someone added the file"
        )


def find(folder: Path, sequence: int) -> dict[str, Any]:
    """One message of a transcript, by its number.

    Raises:
        ObjectNotFound: There is no transcript, or no such message in it.
        CorruptObject: As for ``read``, up to the end of the transcript.
    """
    found, last = None, 0
    for row in read(folder):  # To its end: all of it is checked.
        last = row["sequence"]
        found = row if last == sequence else found
    if found is None:
        raise ObjectNotFound(
            f"the transcript in {folder} has no message {sequence}: its messages are "
            f"1 to {last}"
        )
    return found


def lines(message: Mapping[str, Any], *, fields: bool = False) -> Iterator[str]:
    """One message in words; with ``fields``, also its decoded protocol bytes."""
    row = message
    what = " ".join(filter(None, (row["kind"], row["step"])))
    yield (
        f"{row['sequence']:06d}  {row['direction']:<4}  {row['site']}  round "
        f"{row['round']}  {what}  {row['bytes']:,} bytes  sha256 {row['sha256']}"
    )
    for name, value in row["clear"].items():
        yield f"        header  {name} = {json.dumps(value)}"
    for part in row["sections"]:
        yield (
            f"        {'clear ' if part['in_clear'] else 'opaque'}  {part['name']}: "
            f"{part['count']:,} {part['type']}, {part['bytes']:,} bytes, sha256 "
            f"{part['sha256']}  ({part['holds']})"
        )
        if fields:
            for name, value in part["fields"].items():
                yield f"        field   {part['name']}: {name} = {json.dumps(value)}"


class Summary:
    """What can be read from sites, over a whole transcript."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._counts = {TO: 0, FROM: 0}
        self._bytes = {TO: 0, FROM: 0}
        self._clear: set[str] = set()
        self._signed: dict[str, set[str]] = {}

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message."""
        direction = message["direction"]
        self._counts[direction] += 1
        self._bytes[direction] += message["bytes"]
        if direction == FROM:
            self._clear.update(message["clear"])
            self._clear.update(p["name"] for p in message["sections"] if p["in_clear"])
            for part in message["sections"]:
                if part["fields"]:
                    # Entries of a map differ only in their number.
                    names = {re.sub(r"\[\d+\]", "[]", name) for name in part["fields"]}
                    self._signed.setdefault(part["message"], set()).update(names)

    def lines(self) -> Iterator[str]:
        """The summary in words."""
        for direction in (TO, FROM):
            yield (
                f"{direction} sites: {self._counts[direction]:,} messages, "
                f"{self._bytes[direction]:,} bytes"
            )
        found = ", ".join(sorted(self._clear)) or "nothing"
        yield f"readable from sites: {found}"
        for kind, names in sorted(self._signed.items()):
            yield f"from sites in {kind}: {', '.join(sorted(names))}"


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    index = folder / INDEX
    try:
        text = index.read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise ObjectNotFound(
            f"there is no transcript in {folder} (no {INDEX}): give the folder that "
            "`crossfed simulate --transcript` wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise CorruptObject(f"cannot read {index}: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.keys() != _COLUMNS:
            raise CorruptObject(f"{index}: line {number} is not a line of a transcript")
        yield row


def _content(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a frame, after checking that it is the recorded one."""
    path = folder / Path(str(row["file"])).name
    try:
        data = path.read_bytes()
        message = wire.decode(data)
    except (OSError, WireError) as error:
        raise CorruptObject(f"cannot read {path}: {error}") from error
    kind, step = kind_of(message)
    is_task = isinstance(message, (RoundTask, SecureTask))
    found = {
        "direction": TO if is_task else FROM,
        "site": message.site,
        "round": message.round_index,
        "kind": kind,
        "step": step,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    for name, value in found.items():
        if row[name] != value:
            raise CorruptObject(
                f"{path} does not match the index: {name} is {value!r}, not "
                f"{row[name]!r}"
            )
    _, header, _ = wire_fields.write(message)
    clear = {name: json.loads(header[name]) for name in sorted(header)}
    return {"clear": clear, "sections": _sections(message)}


def _sections(message: WireMessage) -> list[dict[str, Any]]:
    parts = []
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if not isinstance(value, (np.ndarray, bytes)):
            continue
        holds, in_clear = _SECTIONS[type(message), field.name]
        array = value if isinstance(value, np.ndarray) else np.frombuffer(value, "u1")
        body: dict[str, Any] = {"message": None, "fields": {}}
        if isinstance(message, RoundTask) and array.dtype == np.uint64:
            holds = _SUM
        if isinstance(value, bytes):
            holds = holds if value else "empty"
            body = _body(value)
        parts.append(
            {
                "name": field.name,
                "type": "bytes" if isinstance(value, bytes) else str(array.dtype),
                "count": len(value),
                "bytes": array.nbytes,
                "sha256": hashlib.sha256(array.data).hexdigest(),
                "in_clear": in_clear,
                "holds": holds,
            }
            | body
        )
    return parts


def _body(value: bytes) -> dict[str, Any]:
    """Decode a message of ``privacy.secagg``; a site may have sent anything."""
    kind = transcript_bodies.kind_of(value)
    if kind is None:
        return {"message": None, "fields": {}}
    try:
        fields = transcript_bodies.decode(value)
    except ProtocolError as error:
        holds = f"calls itself {kind!r} and cannot be read: {error}"
        return {"message": kind, "fields": {}, "holds": holds}
    return {"message": kind, "fields": fields, "holds": f"{kind!r} of {SUITE}"}
