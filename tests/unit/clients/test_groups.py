"""A site's part in drawing groups: what it remembers and what it refuses."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.secagg_parties import Parties, entropy, site_name

from clients.privacy.groups import DOCUMENT, GroupRule
from clients.privacy.site_memory import FileMemory, InMemory, SiteMemory
from federation.errors import CorruptObject
from privacy.secagg.agreement.canonical import lp, numbers
from privacy.secagg.agreement.groups import (
    AggregatorDraw,
    commit,
    draw_of,
    group_contract,
    read_reveal,
    write_commitments,
    write_finished,
    write_group_offer,
    write_start,
)
from privacy.secagg.agreement.policy import Group, check_against_policy
from privacy.secagg.errors import ContractRefused, DrawRefused, OutOfOrder

PARTIES = Parties(10)
SITES = [site_name(i) for i in range(1, 11)]
DRAW = draw_of(PARTIES.roster, SITES, num_groups=3)
START = write_start(DRAW, ())
RANDOM = {i: entropy(f"draw {i}") for i in range(1, 11)}
FIRST = SITES[0]


def rule(memory: SiteMemory, number: int = 1, **changes: Any) -> GroupRule:
    """A site's rule."""
    values = {
        "site": site_name(number),
        "dataset": "digits",
        "draw": DRAW,
        "random_bytes": RANDOM[number],
    }
    return GroupRule(memory=memory, **(values | changes))


@dataclass
class Everybody:
    """All sites, each with a memory of its own."""

    memories: dict[int, SiteMemory] = field(
        default_factory=lambda: {i: InMemory() for i in range(1, 11)}
    )

    def commitments(self, **changes: Any) -> dict[int, bytes]:
        """What each site commits itself with."""
        return {
            i: rule(memory, i, **changes).commit(START, PARTIES.sites[i])
            for i, memory in self.memories.items()
        }

    def draw(self) -> AggregatorDraw:
        """A whole draw."""
        half = AggregatorDraw(DRAW)
        for data in self.commitments().values():
            half.on_commitment(data)
        for i, memory in self.memories.items():
            half.on_reveal(rule(memory, i).reveal(half.commitments()))
        return half

    def finish(self) -> AggregatorDraw:
        """A whole draw, after which every site knows all secrets."""
        half = self.draw()
        for i, memory in self.memories.items():
            rule(memory, i).take_offer(write_group_offer(half.secrets, b"offer"))
        return half

    def again(self, *left_out: int) -> AggregatorDraw:
        """Another draw, of those who are left."""
        names = [site_name(i) for i in left_out]
        start, half = write_start(DRAW, names), AggregatorDraw(DRAW.without(names))
        rest = {i: m for i, m in self.memories.items() if i not in left_out}
        for i, memory in rest.items():
            half.on_commitment(rule(memory, i).commit(start, PARTIES.sites[i]))
        for i, memory in rest.items():
            half.on_reveal(rule(memory, i).reveal(half.commitments()))
        return half


def test_all_sites_come_to_the_groups_of_the_aggregator():
    """And to each other's."""
    everybody = Everybody()
    half = everybody.draw()
    outcome, offer = half.outcome(), write_group_offer(half.secrets, b"offer")
    for i, memory in everybody.memories.items():
        group, inner = rule(memory, i).take_offer(offer)
        expected = frozenset(outcome.group_of(site_name(i)))
        assert group == Group(sites=expected, partition=outcome.digest)
        assert inner == b"offer"


def test_draw_that_is_begun_again_gives_the_same(tmp_path: Path):
    """After a crash anywhere, in other processes of the sites, and in later runs."""
    folders = {i: tmp_path / str(i) for i in range(1, 11)}
    first = Everybody({i: FileMemory(folder) for i, folder in folders.items()})
    shown = write_commitments(first.commitments())
    rule(first.memories[1], 1).reveal(shown)  # Then the aggregator crashed.
    again = Everybody({i: FileMemory(folder) for i, folder in folders.items()})
    assert write_commitments(again.commitments()) == shown
    outcome = again.finish().outcome()
    third = Everybody({i: FileMemory(folder) for i, folder in folders.items()})
    half = AggregatorDraw(DRAW)
    for data in third.commitments().values():
        half.on_commitment(data)
    assert half.is_known()
    assert half.outcome() == outcome


def test_finished_draw_needs_nobodys_memory_but_most_sites():
    """One site has lost its own, and one lies about the others' commitments."""
    everybody = Everybody()
    outcome = everybody.finish().outcome()
    everybody.memories[10] = InMemory()
    half, answers = AggregatorDraw(DRAW), everybody.commitments()
    for number in (10, 1, 2, 3, 4):
        half.on_commitment(answers[number])
    assert not half.is_known()
    for number in (5, 6, 7, 8):
        half.on_commitment(answers[number])
    assert half.is_known()
    assert half.outcome() == outcome
    forged = {i: bytes(32) for i in range(1, 11)}
    values = {i: DRAW.commitment(i, forged[i]) for i in forged}
    assert half.on_commitment(write_finished(9, values, forged)) == site_name(9)
    assert half.is_known()
    assert half.outcome() == outcome


def test_site_that_does_not_open_its_commitment_is_drawn_without():
    """The others' groups are new ones, with new secrets."""
    everybody = Everybody()
    first = everybody.draw()
    second = everybody.again(10)
    assert not set(first.secrets.values()) & set(second.secrets.values())
    names = {site for group in second.outcome().groups for site in group}
    assert names == set(SITES[:9])


def test_draws_are_counted_and_cost_a_site_each():
    """Whoever wants other groups: the aggregator, a site, or both together."""
    everybody = Everybody()
    everybody.draw()
    everybody.again(10)
    with pytest.raises(DrawRefused, match="site-10 did not reveal"):
        everybody.draw()
    with pytest.raises(DrawRefused, match="site-10 did not reveal"):
        everybody.again(9)
    everybody.again(9, 10)
    with pytest.raises(DrawRefused, match="in no other draw"):
        everybody.again(8, 9, 10)


def test_draw_without_a_site_is_final_once_its_secrets_are_seen():
    """An aggregator that does not like the groups cannot blame a site any more."""
    everybody = Everybody()
    everybody.finish()
    with pytest.raises(DrawRefused, match="in no other draw"):
        everybody.again(10)


def test_draw_in_which_nothing_was_revealed_does_not_count():
    """A site that does not even commit itself tells nobody what comes out."""
    everybody = Everybody()
    for left_out in (10, 9, 8, 7):
        start = write_start(DRAW, [site_name(left_out)])
        rule(everybody.memories[1]).commit(start, PARTIES.sites[1])
    everybody.draw()
    rule(everybody.memories[1]).commit(
        write_start(DRAW, [site_name(10)]), PARTIES.sites[1]
    )
    assert everybody.finish().is_known() is False  # As if it had not been asked.


def test_site_does_not_draw_groups_that_it_is_left_out_of():
    """Nor is there a draw of strangers, or of too few."""
    mine = rule(InMemory())
    for start, text in (
        (write_start(DRAW, [FIRST]), "site was left out"),
        (write_start(DRAW, SITES[1:6]), "3 groups"),
        (lp(b"xsa-v2/draw start") + numbers([11]), "there are no sites"),
    ):
        with pytest.raises(DrawRefused, match=text):
            mine.commit(start, PARTIES.sites[1])


def test_aggregator_cannot_draw_until_it_likes_the_groups():
    """A colluding site brings a new commitment: the honest sites have revealed once."""
    everybody = Everybody()
    everybody.draw()
    shown = everybody.commitments()
    shown[10] = commit(DRAW, 10, bytes(32), PARTIES.sites[10])
    with pytest.raises(DrawRefused, match="site-10 committed to a different"):
        rule(everybody.memories[1]).reveal(write_commitments(shown))


def test_secret_is_revealed_for_one_list_of_commitments():
    """Before it is out, it may be shown to others; afterwards to nobody else."""
    everybody = Everybody()
    shown = everybody.commitments()
    others = {**shown, 10: commit(DRAW, 10, bytes(32), PARTIES.sites[10])}
    mine = rule(everybody.memories[1])
    first = read_reveal(mine.reveal(write_commitments(others)))
    assert first == read_reveal(mine.reveal(write_commitments(others)))
    with pytest.raises(DrawRefused, match="site-10"):
        mine.reveal(write_commitments(shown))


def test_list_is_durable_before_the_secret_leaves(tmp_path: Path):
    """Else a crash in between would allow a second list."""
    everybody = Everybody({i: InMemory() for i in range(2, 11)})
    everybody.memories[1] = FileMemory(tmp_path)
    rule(everybody.memories[1]).reveal(write_commitments(everybody.commitments()))
    (later,) = FileMemory(tmp_path).read(DOCUMENT)["digits"]
    assert len(later["commitments"]) == 10
    assert later["sites"] == SITES


@pytest.mark.parametrize(
    "other",
    [
        replace(DRAW, num_groups=4),
        draw_of(PARTIES.roster, SITES[:9], num_groups=3),
    ],
    ids=["groups", "sites"],
)
def test_other_groups_of_one_dataset_are_refused(other: Any):
    """Of other sites, or another number: by every step of the draw."""
    everybody = Everybody()
    half = everybody.finish()
    mine = rule(everybody.memories[1], draw=other)
    before = everybody.memories[1].read(DOCUMENT)
    with pytest.raises(DrawRefused, match="has drawn 3 groups of site-01, site-02"):
        mine.commit(write_start(other, ()), PARTIES.sites[1])
    with pytest.raises(DrawRefused, match="in no other draw"):
        mine.take_offer(write_group_offer(half.secrets, b"offer"))
    assert everybody.memories[1].read(DOCUMENT) == before


def test_another_dataset_has_a_draw_of_its_own():
    """With another secret, which says nothing of the first."""
    everybody = Everybody()
    first = everybody.commitments()
    other = everybody.commitments(dataset="scans", random_bytes=entropy("other"))
    assert not set(first.values()) & set(other.values())
    everybody.draw()
    assert everybody.commitments(dataset="scans") == other


def test_own_commitment_must_be_among_those_shown():
    """A list with another one in this site's name is not for its secret."""
    everybody = Everybody()
    shown = everybody.commitments()
    shown[1] = commit(DRAW, 1, bytes(32), PARTIES.sites[1])
    with pytest.raises(DrawRefused, match=r"different commitment .*this site"):
        rule(everybody.memories[1]).reveal(write_commitments(shown))


def test_steps_have_an_order():
    """No secret before a commitment, no contract before a draw."""
    everybody = Everybody()
    half = everybody.draw()
    fresh = rule(InMemory())
    with pytest.raises(OutOfOrder, match="was not asked for"):
        fresh.reveal(half.commitments())
    with pytest.raises(OutOfOrder, match="was not asked for"):
        fresh.take_offer(write_group_offer(half.secrets, b"offer"))
    fresh.commit(START, PARTIES.sites[1])
    with pytest.raises(OutOfOrder, match="before groups were drawn"):
        fresh.take_offer(write_group_offer(half.secrets, b"offer"))


def test_offer_with_other_secrets_is_refused():
    """The groups of the contract must follow from what the site was shown."""
    everybody = Everybody()
    half = everybody.draw()
    secrets = {**half.secrets, 5: bytes(32)}
    with pytest.raises(DrawRefused, match="'site-05'"):
        rule(everybody.memories[1]).take_offer(write_group_offer(secrets, b"offer"))


def test_site_refuses_the_contract_of_a_group_that_it_did_not_draw():
    """The aggregator puts a victim beside sites of its own choice."""
    everybody = Everybody()
    half = everybody.draw()
    group, _ = rule(everybody.memories[1]).take_offer(
        write_group_offer(half.secrets, b"")
    )
    others = sorted(set(SITES) - group.sites)
    chosen = group_contract(
        PARTIES.contract(), [FIRST, *others[:2]], half.outcome().digest
    )
    with pytest.raises(ContractRefused, match="group is site-01"):
        check_against_policy(chosen, PARTIES.policy(group=group))


def test_damaged_memory_ends_the_draw(tmp_path: Path):
    """A site that cannot know what it has drawn draws nothing."""
    rule(FileMemory(tmp_path)).commit(START, PARTIES.sites[1])
    path = tmp_path / "groups.json"
    path.write_text(path.read_text().replace("secret", "s3cret"))
    with pytest.raises(CorruptObject, match="not match its digest"):
        rule(FileMemory(tmp_path)).commit(START, PARTIES.sites[1])
