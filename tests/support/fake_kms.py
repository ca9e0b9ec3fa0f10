"""Google Cloud KMS on loopback: encrypt and decrypt with symmetric keys.

Requests and answers are checked against the discovery document. What is encrypted is
bound to its key, to a version of it and to the additional authenticated data.
"""

import base64
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support.google_discovery import Api, NotOfTheApi
from support.google_server import Answer, GoogleServer, Request, json_answer


@dataclass(slots=True)
class Key:
    """A key: its versions, of which the last one encrypts."""

    versions: list[bytes] = field(default_factory=lambda: [secrets.token_bytes(32)])
    disabled: set[int] = field(default_factory=set)


class Refusal(Exception):
    """A refusal in the form of Google's newer APIs."""

    def __init__(self, code: int, status: str, message: str) -> None:
        super().__init__(message)
        self.code, self.status = code, status

    def answer(self) -> Answer:
        error = {"code": self.code, "message": str(self), "status": self.status}
        return json_answer({"error": error}, self.code)


class FakeKms(GoogleServer):
    """The service.

    Attributes:
        keys: By name.
        allowed: Whether the caller may use them.
        allows: Decides by permission and key instead, if set.
        faults: Refusals that the next requests get.
    """

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}
        self.allowed = True
        self.allows: Callable[[str, str], bool] | None = None
        self.faults: list[Refusal] = []
        self.spoil: str | None = None
        self._api = Api("cloudkms.v1")
        super().__init__(self._serve)

    def add_key(self, number: int = 1) -> str:
        ring = "projects/p-1/locations/europe-west4/keyRings/ring"
        name = f"{ring}/cryptoKeys/key-{number}-{secrets.token_hex(3)}"
        self.keys[name] = Key()
        return name

    def _serve(self, request: Request) -> Answer:
        try:
            if self.faults:
                raise self.faults.pop(0)
            return self._call(request)
        except NotOfTheApi as error:
            return Refusal(400, "INVALID_ARGUMENT", str(error)).answer()
        except Refusal as refusal:
            return refusal.answer()

    def _call(self, request: Request) -> Answer:
        call = self._api.call(request.method, request.path, request.query)
        body = json.loads(request.body)
        self._api.check_request(call.method_id, body)
        name = call.params["name"]
        verb_of = call.method_id.rpartition(".")[2].capitalize()
        permission = f"cloudkms.cryptoKeyVersions.useTo{verb_of}"
        if not (self.allowed if self.allows is None else self.allows(permission, name)):
            raise Refusal(403, "PERMISSION_DENIED", f"Permission denied on {name}")
        if name not in self.keys:
            raise Refusal(404, "NOT_FOUND", f"CryptoKey {name} not found.")
        verb = {
            "cloudkms.projects.locations.keyRings.cryptoKeys.encrypt": self._encrypt,
            "cloudkms.projects.locations.keyRings.cryptoKeys.decrypt": self._decrypt,
        }[call.method_id]
        answer = verb(self.keys[name], name, body)
        self._api.check_answer(call.method_id, answer)
        if self.spoil is not None:
            answer[self.spoil] = "0"
        return json_answer(answer)

    def _encrypt(self, key: Key, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        version = len(key.versions) - 1
        _check_enabled(key, name, version)
        nonce = secrets.token_bytes(12)
        sealed = AESGCM(key.versions[version]).encrypt(
            nonce, _taken(body, "plaintext"), _taken(body, _ABOUT)
        )
        ciphertext = bytes([version]) + nonce + sealed
        return {
            "name": f"{name}/cryptoKeyVersions/{version + 1}",
            **_given("ciphertext", ciphertext),
            "verifiedPlaintextCrc32c": "plaintextCrc32c" in body,
            "verifiedAdditionalAuthenticatedDataCrc32c": f"{_ABOUT}Crc32c" in body,
            "protectionLevel": "SOFTWARE",
        }

    def _decrypt(self, key: Key, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        ciphertext = _taken(body, "ciphertext")
        version = ciphertext[0] if ciphertext else 255
        try:
            secret = key.versions[version]
            _check_enabled(key, name, version)
            plaintext = AESGCM(secret).decrypt(
                ciphertext[1:13], ciphertext[13:], _taken(body, _ABOUT)
            )
        except (IndexError, InvalidTag, ValueError):
            message = "Decryption failed: the ciphertext is invalid."
            raise Refusal(400, "INVALID_ARGUMENT", message) from None
        return {
            **_given("plaintext", plaintext),
            "usedPrimary": version == len(key.versions) - 1,
            "protectionLevel": "SOFTWARE",
        }


_ABOUT = "additionalAuthenticatedData"


def _check_enabled(key: Key, name: str, version: int) -> None:
    if version in key.disabled:
        message = f"{name}/cryptoKeyVersions/{version + 1} is not enabled: DISABLED."
        raise Refusal(400, "FAILED_PRECONDITION", message)


def _taken(body: Mapping[str, Any], name: str) -> bytes:
    content = base64.b64decode(body.get(name, ""))
    if str(google_crc32c.value(content)) != body.get(f"{name}Crc32c"):
        raise Refusal(400, "INVALID_ARGUMENT", f"checksum of {name}")
    return content


def _given(name: str, content: bytes) -> dict[str, Any]:
    return {
        name: base64.b64encode(content).decode(),
        f"{name}Crc32c": str(google_crc32c.value(content)),
    }
