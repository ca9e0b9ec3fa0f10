"""What every KeyService promises; one suite, run on each implementation.

A new service is one more name in ``SERVICES`` and a fixture ``NAME_pair``: two
services of the same kind with different keys.
"""

from pathlib import Path
from typing import Any

import pytest
from support.key_services import aws_kms_service, gcp_kms_service

from cloud_adapters.keys.context import MAX_WRAPPED_BYTES
from cloud_adapters.keys.key_file import KeyFile, add_key
from federation.errors import CorruptObject, KeyRefused, StoreUnavailable
from federation.protocols import KeyService

SERVICES = ("aws", "file", "gcp")

CONTEXT = {"crossfed": "object", "key": "round/\N{SNOWMAN}"}

Pair = tuple[KeyService, KeyService]


@pytest.fixture
def file_pair(tmp_path: Path) -> Pair:
    for name in ("ours", "theirs"):
        add_key(tmp_path / name)
    return KeyFile(tmp_path / "ours"), KeyFile(tmp_path / "theirs")


@pytest.fixture
def aws_pair(s3_server: Any) -> Pair:
    return aws_kms_service(s3_server), aws_kms_service(s3_server)


@pytest.fixture
def gcp_pair(kms_server: Any) -> Pair:
    return gcp_kms_service(kms_server), gcp_kms_service(kms_server)


@pytest.fixture(params=SERVICES)
def pair(request: pytest.FixtureRequest) -> Pair:
    made: Pair = request.getfixturevalue(f"{request.param}_pair")
    return made


@pytest.fixture
def keys(pair: Pair) -> KeyService:
    return pair[0]


def test_generated_key_is_unwrapped(keys: KeyService):
    """It has 32 bytes, and its wrapping does not hold it."""
    made = keys.generate(CONTEXT)
    assert len(made.plaintext) == 32
    assert keys.unwrap(made.wrapped, CONTEXT) == made.plaintext
    assert made.plaintext not in made.wrapped


def test_keys_are_new(keys: KeyService):
    """Two calls make two keys."""
    first, second = keys.generate(CONTEXT), keys.generate(CONTEXT)
    assert first.plaintext != second.plaintext
    assert first.wrapped != second.wrapped


def test_given_key_is_wrapped(keys: KeyService):
    """As for an object whose wrapping key changes; no other length is a key."""
    wrapped = keys.wrap(bytes(range(32)), CONTEXT)
    assert keys.unwrap(wrapped, CONTEXT) == bytes(range(32))
    for length in (0, 16, 31, 33):
        with pytest.raises(ValueError, match="32 bytes"):
            keys.wrap(bytes(length), CONTEXT)


def test_order_of_a_context_means_nothing(keys: KeyService):
    """It is a mapping."""
    made = keys.generate(CONTEXT)
    backwards = dict(reversed(CONTEXT.items()))
    assert keys.unwrap(made.wrapped, backwards) == made.plaintext


def test_longest_context(keys: KeyService):
    """The longest key that an object may have, in a header with room for its key."""
    context = {"crossfed": "object", "key": "\N{SNOWMAN}" * 341}
    made = keys.generate(context)
    assert keys.unwrap(made.wrapped, context) == made.plaintext
    assert len(made.wrapped) <= MAX_WRAPPED_BYTES


@pytest.mark.parametrize(
    "context",
    [
        {"crossfed": "object", "key": "round/other"},
        {"crossfed": "object"},
        {**CONTEXT, "more": "x"},
        {},
    ],
)
def test_other_context_is_refused(keys: KeyService, context: dict[str, str]):
    """A key of one object is of no use for another."""
    made = keys.generate(CONTEXT)
    with pytest.raises(CorruptObject):
        keys.unwrap(made.wrapped, context)


def test_changed_wrapping_is_found(keys: KeyService):
    """Wherever it was changed, and however much is missing."""
    wrapped = keys.generate(CONTEXT).wrapped
    # StoreUnavailable: moto forbids a key of which it has never heard.
    errors = (CorruptObject, KeyRefused, StoreUnavailable)
    for at in {*range(0, len(wrapped), 11), len(wrapped) - 1}:
        changed = bytearray(wrapped)
        changed[at] ^= 1
        with pytest.raises(errors):
            keys.unwrap(bytes(changed), CONTEXT)
        with pytest.raises(errors):
            keys.unwrap(wrapped[:at], CONTEXT)


def test_wrong_key_is_named(pair: Pair):
    """What another key of the same kind wrapped is refused, and not called damaged."""
    ours, theirs = pair
    wrapped = ours.generate(CONTEXT).wrapped
    with pytest.raises(KeyRefused, match="key"):
        theirs.unwrap(wrapped, CONTEXT)


def test_wrong_kind_is_named(keys: KeyService):
    """The message says what kind of key is needed."""
    own = keys.name.partition(":")[0]
    for kind in {"file", "aws-kms", "gcp-kms"} - {own}:
        with pytest.raises(KeyRefused, match=f"'{kind}'.*{own}"):
            keys.unwrap(kind.encode() + b":" + bytes(60), CONTEXT)


def test_services_name_themselves(keys: KeyService):
    """Kind and place, and no secret in any text."""
    assert keys.name.partition(":")[0] in {"file", "aws-kms", "gcp-kms"}
    made = keys.generate(CONTEXT)
    assert repr(made) == "DataKey()"
