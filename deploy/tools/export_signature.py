"""The signature of an export: who gives this model away, and which files are in it.

    signature.json   {"files": {NAME: SHA-256}, "format": 1, "public_key", "run_id",
                     "signature"}

Ed25519 (RFC 8032) with a key file of ``crossfed keys new``, under a label of its own:
no signature of another message passes for it. Signed is the document without its last
member, as canonical JSON.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloud_adapters.storage.disk import transfer
from cloud_adapters.storage.disk.store import strays
from federation.errors import CorruptObject, ObjectNotFound, ProtocolError
from federation.protocols import ObjectStore
from privacy.secagg.agreement.identity import Identity, Label, PublicIdentity

SIGNATURE = "signature.json"
FORMAT = 1
MAX_BYTES = 16 << 20  # A hundred thousand files.


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedExport:
    """An export whose signature and files are those of its signer.

    Attributes:
        url: Where it is.
        run_id: The run that the model is of.
        public_key: Public key of the signer, in hexadecimal digits.
        sha256: Digests of all files by name, as they were read.
    """

    url: str
    run_id: str
    public_key: str
    sha256: Mapping[str, str]


def sign(identity: Identity, run_id: str, files: Mapping[str, str]) -> bytes:
    """Sign an export: the content of ``signature.json``.

    Args:
        identity: Identity of the signer.
        run_id: ID of the exported run.
        files: SHA-256 of each file by name.
    """
    facts = {
        "files": dict(files),
        "format": FORMAT,
        "public_key": identity.public.key.hex(),
        "run_id": run_id,
    }
    signature = identity.sign(Label.EXPORT, _canonical(facts)).hex()
    return _canonical({**facts, "signature": signature}) + b"\n"


def verify(store: ObjectStore, public_key: str) -> VerifiedExport:
    """Check that an export is complete, unchanged and signed with a key.

    1. Read the signature, and check that the expected key made it.
    2. Check that the store holds the signed files and no others.
    3. Read every file and compare its digest.

    Args:
        store: Its root is the place of the export.
        public_key: The expected signer's, 64 hexadecimal digits, from a source other
            than the export.

    Raises:
        ObjectNotFound: There is no signature, or a file is missing.
        CorruptObject: A file was changed, or is not covered.
        BadSignature: Another key signed it, or nothing did.
        ProtocolError: The signature is malformed.
    """
    facts = _parsed(store, _content(store))  # 1.
    expected = PublicIdentity(bytes.fromhex(public_key))
    signature = bytes.fromhex(facts.pop("signature"))
    expected.verify(Label.EXPORT, _canonical(facts), signature, who=SIGNATURE)
    files = facts["files"]
    for info in store.list():  # 2.
        if info.key != SIGNATURE and info.key not in files:
            raise CorruptObject(
                f"{info.key!r} in {store.url} is not covered by the signature: remove "
                "it, or export again to an empty place"
            )
    for name in strays(store.url):
        raise CorruptObject(
            f"{name!r:.200} in {store.url} is a link, a special file or a name that no "
            "export has, so the signature does not cover it: remove it, or get the "
            "export again from its signer"
        )
    for name, digest in files.items():  # 3.
        found = hashlib.sha256()
        for part in transfer.stream(store, name):
            found.update(part)
        if found.hexdigest() != digest:
            raise CorruptObject(
                f"{name!r} in {store.url} has changed since it was signed: get the "
                "export again from its signer"
            )
    return VerifiedExport(
        url=store.url, run_id=facts["run_id"], public_key=public_key, sha256=files
    )


def _content(store: ObjectStore) -> bytes:
    try:
        size = store.stat(SIGNATURE).size
    except ObjectNotFound as error:
        raise ObjectNotFound(
            f"{store.url} has no {SIGNATURE}: this export was not signed"
        ) from error
    if size > MAX_BYTES:
        raise ProtocolError(f"{SIGNATURE} has {size} bytes, more than {MAX_BYTES}")
    return b"".join(bytes(part) for part in transfer.stream(store, SIGNATURE))


def _parsed(store: ObjectStore, content: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(content)
        fault = _fault(facts)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        fault = str(error)
    if fault:
        raise ProtocolError(
            f"{SIGNATURE} in {store.url} is not a signature of an export: {fault}; if "
            "the export is encrypted, give --encryption-key"
        )
    return facts  # type: ignore[no-any-return]


def _fault(facts: Any) -> str:
    """Say what is wrong with a document; texts that are not hexadecimal raise."""
    names = {"files", "format", "public_key", "run_id", "signature"}
    if facts.keys() != names:
        return "it has other members"
    if facts["format"] != FORMAT:
        return f"it has format {facts['format']!r:.20}, not {FORMAT}"
    for text in (facts["signature"], *facts["files"].values()):
        bytes.fromhex(text)
    return ""


def _canonical(facts: Mapping[str, object]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
