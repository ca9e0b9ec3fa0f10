"""A secure run in which one site's shares are wrong continues without it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.dealers import flipped
from support.secure_runs import MASK, Run, run, secure_job, step_of

from cloud_adapters.storage.memory import MemoryStore
from federation import events
from federation.messages import SecureAnswer, SecureStep, SiteMessage, Task
from privacy.secagg.protocol.commitments import SECRET, dealt_digests
from privacy.secagg.protocol.messages import Head, MaskedAnswer, Shares

LIAR, PEER = "site-1", "site-3"
NUMBER = {f"site-{i}": i + 1 for i in range(5)}

pytestmark = pytest.mark.slow


@dataclass
class Lying:
    """A site that changes what it deals and what it releases, and signs it."""

    site: Any
    deal: Callable[[MaskedAnswer], MaskedAnswer] = lambda masked: masked
    release: Callable[[Shares], Shares] = lambda shares: shares

    def handle(self, task: Task) -> SiteMessage:
        message = self.site.handle(task)
        if step_of(task) == MASK:
            return replace(message, body=self._dealt(message.body))
        if isinstance(message, SecureAnswer) and message.step is SecureStep.REVEAL:
            shares = self.release(Shares.from_bytes(message.body))
            return replace(message, body=self._signed(shares).to_bytes())
        return message

    def _signed(self, message: Any) -> Any:
        return message.signed_by(self.site._seal._protection.identity)

    def _dealt(self, body: bytes) -> bytes:
        masked = self.deal(MaskedAnswer.from_bytes(body))
        dealt = dealt_digests(masked.sealed, masked.rows)
        head = replace(Head.from_bytes(masked.head), dealt=dealt)
        signed = self._signed(head).to_bytes()
        self.site._seal._session._round.head = signed
        return replace(masked, head=signed).to_bytes()


def spoilt_for(*holders: int) -> Callable[[MaskedAnswer], MaskedAnswer]:
    """One bit of what is sealed for some holders."""

    def deal(masked: MaskedAnswer) -> MaskedAnswer:
        wrong = {x: flipped(masked.sealed[x]) for x in holders}
        return replace(masked, sealed={**masked.sealed, **wrong})

    return deal


def without_a_secret(masked: MaskedAnswer) -> MaskedAnswer:
    """A commitment to another secret than is shared."""
    wrong = flipped(masked.rows[SECRET])
    return replace(masked, rows={**masked.rows, SECRET: wrong})


def wrong_share(shares: Shares) -> Shares:
    """One bit of a share that a peer dealt."""
    peer = NUMBER[PEER]
    wrong = {**shares.self_shares, peer: flipped(shares.self_shares[peer])}
    return replace(shares, self_shares=wrong)


def accusing(*dealers: int) -> Callable[[Shares], Shares]:
    """Dispute what some sites dealt, which was right."""

    def release(shares: Shares) -> Shares:
        kept = [j for j in shares.self_shares if j not in dealers]
        return replace(
            shares,
            self_shares={j: shares.self_shares[j] for j in kept},
            pair_shares={j: shares.pair_shares[j] for j in kept},
            disputed=tuple(sorted({*dealers} & shares.self_shares.keys())),
        )

    return release


def lied(**lies: Any) -> Run:
    """Three rounds of five sites, of which four are enough."""
    return run(secure_job(), wraps={LIAR: lambda site: Lying(site, **lies)})


def left_out(found: Run, round_index: int) -> list[str]:
    """Who was not asked in a round."""
    return [
        site
        for site, text in found.failures(round_index)
        if text.startswith("left out: ")
    ]


def warned(found: Run, text: str) -> bool:
    return any(text in warning for warning in found.warnings())


def test_dealer_of_a_wrong_share_is_left_out(caplog: pytest.LogCaptureFixture):
    """The round has its sum, and the next ones are of the four others."""
    found = lied(deal=spoilt_for(NUMBER[PEER]))
    assert found.statuses() == ["completed"] * 3
    assert warned(found, f"site '{PEER}' says that site '{LIAR}' sent it")
    assert set(found.answered(1)) == set(NUMBER)
    assert [left_out(found, r) for r in (1, 2, 3)] == [[], [LIAR], [LIAR]]
    assert set(found.answered(3)) == set(NUMBER) - {LIAR}
    assert len(found.failures(3)) == 1  # It is not asked, so it does not answer.
    (line,) = [r for r in caplog.records if r.name == "clients.privacy.ring_seal"]
    assert f"sealed shares of site '{LIAR}'" in line.message


def test_dealer_of_wrong_shares_to_most_costs_one_round():
    """Too few are left to open its mask; without it there is a sum again."""
    found = lied(deal=spoilt_for(1, 3, 4))
    assert found.statuses() == ["lost", "completed", "completed"]
    assert left_out(found, 2) == [LIAR]


def test_dealer_of_shares_without_a_secret_costs_one_round():
    """Its own commitments name it."""
    found = lied(deal=without_a_secret)
    assert found.statuses() == ["lost", "completed", "completed"]
    assert warned(found, f"site '{LIAR}' is at fault")
    assert left_out(found, 2) == left_out(found, 3) == [LIAR]


def test_site_that_releases_a_wrong_share_is_left_out():
    """It is named in its round, which four others open."""
    found = lied(release=wrong_share)
    assert found.statuses() == ["completed"] * 3
    assert warned(found, f"site '{LIAR}' is at fault")
    (failure,) = found.failures(1)
    assert failure[0] == LIAR
    assert "released a different share" in failure[1]
    assert left_out(found, 2) == left_out(found, 3) == [LIAR]


def without_shares(masked: MaskedAnswer) -> MaskedAnswer:
    """An answer that its site has dealt to nobody."""
    return replace(masked, sealed={}, rows={})


def test_site_that_deals_shares_to_nobody_is_never_in_the_sum():
    """Its answer is refused and says why; the others can open theirs."""
    found = lied(deal=without_shares)
    assert found.statuses() == ["completed"] * 3
    for index in (1, 2, 3):
        assert LIAR not in found.answered(index)
        (failure,) = found.failures(index)
        assert failure[0] == LIAR
        assert "bundle of shares" in failure[1]


def test_false_accuser_keeps_one_honest_site_out_at_most():
    """With the next accusation it is the accuser that is left out."""
    found = lied(release=accusing(NUMBER[PEER]))
    assert left_out(found, 2) == left_out(found, 3) == [PEER]
    assert found.statuses() == ["completed"] * 3
    found = lied(release=accusing(NUMBER[PEER], NUMBER["site-0"]))
    assert left_out(found, 2) == left_out(found, 3) == [LIAR]
    assert set(found.answered(3)) == set(NUMBER) - {LIAR}


@dataclass
class Silent(Lying):
    """A liar that answers nothing from the second round on, setups included."""

    rounds: int = 0

    def handle(self, task: Task) -> SiteMessage:
        self.rounds = max(self.rounds, task.round_index)
        assert self.rounds < 2, "a site that is left out was asked"
        return super().handle(task)


class Restarted:
    """A site that loses its keys before a round."""

    def __init__(self, site: Any, round_index: int) -> None:
        self._site, self._at = site, round_index

    def handle(self, task: Task) -> SiteMessage:
        if task.round_index == self._at:
            self._site.close()
            self._at = -1  # Once; setups have round 0.
        return self._site.handle(task)


def announced(found: Run) -> list[tuple[int, tuple[str, ...]]]:
    """Who is left out, as events say when it changes."""
    return [
        (e.round_index, e.sites)
        for e in found.seen
        if isinstance(e, events.SitesLeftOut)
    ]


def test_setup_goes_on_without_the_site_that_is_left_out():
    """Another site restarts, and the new keys take nothing that the liar has to do."""
    wraps = {
        LIAR: lambda site: Silent(site, release=wrong_share),
        PEER: lambda site: Restarted(site, 3),
    }
    found = run(secure_job(7, threshold=5, rounds=5), wraps=wraps)
    assert found.statuses() == ["completed"] * 5
    assert announced(found) == [(1, (LIAR,))]
    assert [len(found.answered(r)) for r in (1, 2, 3, 4, 5)] == [7, 6, 5, 6, 6]
    session = found.sites[PEER]._seal._session
    assert session.cohort == (1, 3, 4, 5, 6, 7)


def test_liar_stays_left_out_when_another_coordinator_resumes():
    """What was found is in the checkpoint; the setup of the new one is without it."""
    store, asked = MemoryStore(), iter([False, True])
    job = secure_job(rounds=3)
    first = run(
        job,
        wraps={LIAR: lambda site: Lying(site, release=wrong_share)},
        store=store,
        stop_requested=lambda: next(asked),
    )
    assert announced(first) == [(1, (LIAR,))]

    def never(site: Any) -> Any:
        return Silent(site, rounds=2)  # It answers nothing at all.

    again = run(job, wraps={LIAR: never}, store=store)
    assert again.statuses() == ["completed"] * 2
    assert announced(again) == [(2, (LIAR,))]
    assert left_out(again, 2) == left_out(again, 3) == [LIAR]


def test_accused_site_comes_back_with_the_next_setup():
    """It has no keys of the setup that it was left out of, and says so."""
    lies = iter([accusing(NUMBER[PEER]), accusing(), accusing(NUMBER["site-0"])])

    def in_turn(shares: Shares) -> Shares:
        return next(lies, accusing())(shares)

    wraps = {
        LIAR: lambda site: Lying(site, release=in_turn),
        "site-4": lambda site: Restarted(site, 2),
    }
    found = run(secure_job(7, threshold=5, rounds=5), wraps=wraps)
    assert announced(found) == [(1, (PEER,)), (3, (LIAR,))]
    assert [len(found.answered(r)) for r in (1, 2, 3, 4, 5)] == [7, 5, 6, 5, 6]
    assert PEER in found.answered(5)


def test_honest_run_blames_nobody():
    """Or nothing above could fail."""
    found = lied()
    assert found.statuses() == ["completed"] * 3
    assert not found.warnings()
    assert not any(found.failures(r) for r in (1, 2, 3))
