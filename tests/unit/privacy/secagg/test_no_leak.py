"""What is left in memory, and what is said in errors and messages."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.secagg_parties import DIGEST, HEADER, Run, site_name, start

from privacy.secagg.agreement import identity
from privacy.secagg.protocol import client, key_schedule as keys, setup
from privacy.secagg.protocol.commitments import commit
from privacy.secagg.protocol.key_schedule import Secret


def reachable(root: object) -> Iterator[object]:
    """Everything that an object holds on to, except modules and classes."""
    seen: set[int] = set()
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        yield item
        queue.extend(gc.get_referents(item))


def play(run: Run) -> tuple[dict[str, list[bytes]], list[bytes]]:
    """A whole P2 round without site 5; the round's secrets and all messages."""
    secrets: dict[str, list[bytes]] = {"streams": [], "receive": [], "own": []}
    said: list[bytes] = []
    server = run.aggregator_round()
    for i, session in run.sessions.items():
        masks = session.begin_round(run.facts())
        streams = (*masks.vector, *masks.header)
        secrets["streams"] += [bytes(stream.key) for stream in streams]
        current = session._round
        assert current is not None
        shared = current.shared
        secrets["receive"] += [bytes(k.buffer) for k in shared.receive.values()]
        own = bytes(shared.own)
        secrets["own"] += [own[at : at + 33] for at in range(0, len(own), 33)]
        said.append(session.finish_masked(vector_digest=DIGEST, header_digest=HEADER))
        if i != 5:
            server.on_masked(said[-1], vector_digest=DIGEST, header_digest=HEADER)
    server.close_masked()
    alive = (1, 2, 3, 4)
    said.append(server.survivors())
    for i in alive:
        said.append(run.sessions[i].on_survivors(server.survivors()))
        server.on_consent(said[-1])
    server.close_consents()
    for i in alive:
        said.append(server.reveal(site_name(i)))
        run.sessions[i].on_reveal(said[-1])
    return secrets, said


def test_nothing_of_a_round_is_left_at_a_site():
    """After the last answer a session reaches no key or share of the round."""
    run = start(5)
    secrets, _ = play(run)
    known = {value for values in secrets.values() for value in values}
    for i in (1, 2, 3, 4):
        held = [
            x for x in reachable(run.sessions[i]) if isinstance(x, bytes | bytearray)
        ]
        assert held
        assert not known & {bytes(x) for x in held}


def test_shares_in_clear_are_overwritten(monkeypatch: pytest.MonkeyPatch):
    """Those that a site deals, its own secrets among them, and those that it opens."""
    held: list[bytearray] = []
    release = client.SiteSession._release

    def commit_to(bundle: bytearray, **facts: Any) -> bytes:
        held.append(bundle)
        return commit(bundle, **facts)

    def release_from(session: Any, opened: Any, current: Any) -> Any:
        held.extend(opened.values())
        return release(session, opened, current)

    monkeypatch.setattr(client, "commit", commit_to)
    monkeypatch.setattr(client.SiteSession, "_release", release_from)
    run = start(5)
    play(run)
    run.sessions[5].close()  # It was not among the survivors.
    assert len(held) == 5 * 6 + 4 * 3 + 4 * 4
    assert not any(map(any, held))


def test_no_message_shows_a_secret():
    """Before R3 no key and no share stands in any message in clear."""
    run = start(5)
    secrets, said = play(run)
    for message in said:
        for values in secrets.values():
            assert not any(value in message for value in values)


def test_roots_are_in_no_message():
    """The setup's messages and the first round's carry public halves only."""
    run = start(5)
    roots = [
        bytes(root.buffer)
        for secrets in run.secrets.values()
        for pair in secrets.roots.values()
        for root in (pair._mask, pair._channel)
    ]
    spoken = [run.record.book, run.record.confirms, run.masked(1)]
    assert not any(root in data for root in roots for data in spoken)


# A field of these is a secret, or leads to one. Keys write a text of their
# own, which the second test reads.
HOLDERS: list[type] = [
    *(keys.Stream, keys.RoundMasks, keys.RoundPair, keys.PairRoots, keys.RunSecrets),
    *(client._OwnShares, client._Round, client.SiteSession, setup.SiteSetup),
]


@pytest.mark.parametrize("cls", HOLDERS, ids=lambda cls: cls.__name__)
def test_secret_holders_hide_themselves(cls: type):
    """No class that holds secrets has a generated text, which would show them."""
    assert cls.__repr__ is object.__repr__  # type: ignore[comparison-overlap]


def test_texts_of_keys_show_no_secret():
    """A secret, a run's keys and an identity say what they are, and no more."""
    own = identity.generate(os.urandom)
    assert repr(Secret(b"sixteen letters!")) == "Secret(...)"
    assert repr(keys.RunKeys(os.urandom, hybrid=True)) == "RunKeys(...)"
    assert repr(own) == f"Identity({own.public.fingerprint[:19]}...)"


@pytest.mark.parametrize("num_sites", [3, 5])
def test_round_secrets_are_overwritten_as_soon_as_they_are_shared(
    num_sites: int, monkeypatch: pytest.MonkeyPatch
):
    """After R1 began, only the next roots and the receiving keys still exist."""
    made: list[Secret] = []

    class Recorded(Secret):
        __slots__ = ()

        def __init__(self, data: bytes | bytearray) -> None:
            super().__init__(data)
            made.append(self)

    run = start(num_sites)
    for module in (keys, client):
        monkeypatch.setattr(module, "Secret", Recorded)
    run.sessions[1].begin_round(run.facts())
    current = run.sessions[1]._round
    assert current is not None
    roots = run.secrets[1].roots.values()
    expected = {id(key) for key in current.shared.receive.values()}
    expected |= {id(root) for pair in roots for root in (pair._mask, pair._channel)}
    assert expected == {id(secret) for secret in made if not secret.erased}
