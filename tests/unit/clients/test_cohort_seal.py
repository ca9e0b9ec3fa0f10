"""A site whose update is summed with whoever is ready, and how to cheat it."""

import hashlib
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.free_cohorts import (
    Parties,
    cohort_of,
    free_job,
    refusal,
)

from federation.ids import SiteId
from federation.messages import (
    MaskedUpdate,
    SecureAnswer,
    SecureStep,
    TaskKind,
)
from privacy.secagg.agreement.contract import Member
from privacy.secagg.agreement.free_cohort import (
    FinishedUpdate,
    FreeCohort,
    write_free_offer,
)
from privacy.secagg.errors import MalformedMessage
from privacy.secagg.protocol import train
from privacy.secagg.protocol.messages import Book
from privacy.secagg.protocol.setup import AggregatorSetup

A, B, C, D = "site-0", "site-1", "site-2", "site-3"


@pytest.fixture
def parties() -> Parties:
    return Parties()


def clipped(update_d: np.ndarray, clip_norm: float) -> np.ndarray:
    norm = float(np.linalg.norm(update_d))
    return update_d * min(1.0, clip_norm / norm)


def test_sum_has_each_update_clipped_and_scaled_by_its_age(parties: Parties):
    """The newest model and one that is two older: the sum is of both, and no more."""
    parties.models = {2: parties.first_d + np.float32(0.5)}
    old, new = parties.train(A, 1), parties.train(B, 3)
    clip = parties.rehearsal.contract.clip_norm
    for site, times in ((A, 1000.0), (B, 1.0)):  # Of one far beyond the clip norm.
        parties.kept(site).result.update_d[:] *= times
    kept = [parties.kept(site).result.update_d.copy() for site in (A, B)]
    assert np.linalg.norm(kept[0]) > clip > np.linalg.norm(kept[1])
    cohort = cohort_of(3, old, new)
    assert [cohort.age(each) for each in cohort.updates] == [2, 0]
    keys = parties.keys(cohort)
    masked = [parties.sealed(each, keys) for each in cohort.updates]
    mean_d, totals = parties.opened(cohort, keys, masked)
    expected = (clipped(kept[0], clip) / 3**0.5 + clipped(kept[1], clip)) / 2
    np.testing.assert_allclose(mean_d, expected, atol=1e-4)
    assert totals[train.WEIGHT] == 2
    assert [(m.round_index, m.based_on) for m in masked] == [(1, 0), (3, 2)]  # type: ignore[union-attr]


@pytest.mark.parametrize(("second", "counts"), [(1, True), (2, False)])
def test_results_are_reported_if_all_are_of_the_newest_model(
    parties: Parties,
    second: int,
    counts: bool,  # noqa: FBT001
):
    """Else the aggregator would see results of a few sites, or of several models."""
    cohort = cohort_of(second, parties.train(A, 1), parties.train(B, second))
    keys = parties.keys(cohort)
    _, totals = parties.opened(
        cohort, keys, [parties.sealed(each, keys) for each in cohort.updates]
    )
    assert (totals["evaluation_count"] > 0) == counts


def test_newer_task_takes_the_place_of_an_update(parties: Parties):
    old = parties.train(A)
    cohort = cohort_of(1, old, parties.train(B))
    keys = parties.keys(cohort)
    parties.train(A, 2)
    assert parties.charges(A) == 2
    said = refusal(parties.sealed(old, keys))
    assert said.startswith("not_set_up")


def test_older_task_changes_nothing(parties: Parties):
    """It would be charged once more, and one number would have two updates."""
    parties.train(A, 2)
    kept = parties.kept(A)
    for task in (parties.task(A, 1), parties.task(A, 2), parties.task(A, 2, 0)):
        assert refusal(parties.sites[A].handle(task)).startswith("duplicate: round")
    assert parties.kept(A) is kept
    assert parties.charges(A) == 1


def test_number_of_a_sum_is_never_trained_for_again(parties: Parties):
    """Also in a new process, which knows only what is on the disk."""
    cohort = cohort_of(3, parties.train(A, 3), parties.train(B, 3))
    keys = parties.keys(cohort)
    assert isinstance(parties.sealed(cohort.updates[0], keys), MaskedUpdate)
    parties.sites[A]._seal = parties.rehearsal.seal(SiteId(A), None)
    for index in (1, 3):
        said = refusal(parties.sites[A].handle(parties.task(A, index)))
        assert said.startswith("duplicate: round")
    assert parties.charges(A) == 1
    parties.train(A, 4)


def test_closed_site_keeps_nothing(parties: Parties):
    cohort = cohort_of(1, parties.train(A), parties.train(B))
    keys = parties.keys(cohort)
    parties.sites[A].close()
    assert parties.kept(A) is None
    assert refusal(parties.sealed(cohort.updates[0], keys)).startswith("not_set_up")


def test_training_that_fails_is_declined_without_a_reason(parties: Parties):
    """As in rounds: why a site declines depends on its records."""
    trainer: Any = parties.sites[A]._current_trainer()
    fit = trainer.fit

    def broken(*args: Any, **named: Any) -> Any:
        result = fit(*args, **named)
        result.weights_d[0] = np.nan
        return result

    trainer.fit = broken
    answer = parties.sites[A].handle(parties.task(A, 1))
    assert isinstance(answer, SecureAnswer)
    assert (answer.step, answer.body) == (SecureStep.DECLINE, b"")
    assert parties.kept(A) is None


# What an aggregator may try with an update that a site keeps.


def test_update_is_sealed_in_one_cohort(parties: Parties):
    """Two sums with it would give away the rest of one from the other's."""
    mine = parties.train(A)
    first = cohort_of(1, mine, parties.train(B))
    keys = parties.keys(first)
    assert isinstance(parties.sealed(mine, keys), MaskedUpdate)
    second = cohort_of(1, mine, parties.train(C))
    assert "keeps no update" in refusal(parties.offered(A, second))
    assert "sealed its update before" in refusal(parties.sealed(mine, keys))


def test_keys_of_two_cohorts_at_once_seal_no_update_twice(parties: Parties):
    """Keys of the newest cohort take the place of those before."""
    mine = parties.train(A)
    first = cohort_of(1, mine, parties.train(B))
    earlier = parties.keys(first)
    newest = parties.keys(cohort_of(1, mine, parties.train(C)))
    assert refusal(parties.sealed(mine, earlier)).startswith("not_set_up")
    assert isinstance(parties.sealed(mine, newest), MaskedUpdate)
    for keys in (earlier, newest):
        assert refusal(parties.sealed(mine, keys)).startswith("not_set_up")


def test_keys_of_an_earlier_cohort_seal_nothing(parties: Parties):
    """They were made, and the aggregator asks with them after another offer."""
    mine = parties.train(A)
    keys = parties.keys(cohort_of(1, mine, parties.train(B)))
    parties.sites[A]._seal._session_of(  # type: ignore[attr-defined]
        train.read_train(parties.sealing(mine, keys).secure)
    )
    parties.offered(A, cohort_of(1, mine, parties.train(C)))
    assert "of an earlier cohort" in refusal(parties.sealed(mine, keys))
    assert parties.kept(A) is not None


@pytest.mark.parametrize("sites", [(A,), ()])
def test_cohort_smaller_than_the_job_says_is_refused(
    parties: Parties, sites: tuple[str, ...]
):
    pair = cohort_of(1, parties.train(A), parties.train(B))
    updates = [update for update in pair.updates if update.site in sites]
    body = write_free_offer(cohort_of(1, *updates), parties.setup(pair).offer())
    answer = parties.step(A, SecureStep.ADVERTISE, body)
    assert "too small: the job says 2" in refusal(answer)


def test_cohort_smaller_than_the_operator_demands_is_refused(parties: Parties):
    seal: Any = parties.sites[A]._seal
    policy_of = seal._protection.policy_of
    strict = lambda layout: replace(policy_of(layout), min_sites=3)  # noqa: E731
    seal._protection = replace(seal._protection, policy_of=strict)
    pair = cohort_of(1, parties.train(A), parties.train(B))
    said = refusal(parties.offered(A, pair))
    assert "min_sites" in said
    three = cohort_of(1, *pair.updates, parties.train(C))
    assert isinstance(parties.offered(A, three), SecureAnswer)


def test_contract_that_opens_a_sum_without_some_sites_is_refused():
    parties = Parties(free_job(num_sites=4, size=4))
    all_of_them = cohort_of(1, *map(parties.train, (A, B, C, D)))
    said = refusal(parties.offered(A, all_of_them, threshold=3, min_sites=3))
    assert "a sum may hold 3 updates" in said


def encoded(cohort: FreeCohort) -> bytes:
    """Its encoding, written here a second time."""

    def lp(data: bytes) -> bytes:
        return struct.pack(">Q", len(data)) + data

    data = lp(b"xsa-v2/free cohort")
    data += struct.pack(">QQ", cohort.round_index, len(cohort.updates))
    for each in cohort.updates:
        data += lp(each.site.encode())
        data += struct.pack(">QQ", each.round_index, each.based_on)
        data += lp(each.model_digest)
    return data


def test_cohort_has_one_encoding(parties: Parties):
    """Its digest is in every key: sites that were shown others are in no sum."""
    cohort = cohort_of(2, parties.train(A), parties.train(B, 2))
    assert cohort.to_bytes() == encoded(cohort)
    assert cohort.digest == hashlib.sha256(encoded(cohort)).digest()
    assert FreeCohort.from_bytes(encoded(cohort)) == cohort


@pytest.mark.parametrize("others", [(A, A), (B, A)], ids=["repeated", "unordered"])
def test_site_that_is_there_twice_is_refused(parties: Parties, others: tuple[str, ...]):
    """With itself in place of another site, its update would be most of the sum."""
    mine = parties.train(A)
    updates = tuple(replace(mine, site=SiteId(site)) for site in others)
    forged: Any = object.__new__(FreeCohort)
    forged.__dict__.update(round_index=1, updates=updates)
    with pytest.raises(MalformedMessage, match="distinct"):
        FreeCohort.from_bytes(encoded(forged))


@pytest.mark.parametrize(
    "change", [{"based_on": 1}, {"round_index": 3}], ids=["later model", "later round"]
)
def test_update_of_the_future_is_refused(parties: Parties, change: dict[str, int]):
    """Its age would be negative, and its weight more than one."""
    with pytest.raises(MalformedMessage, match=r"round 2 .* an update of round"):
        cohort_of(2, replace(parties.train(A), **change))


@pytest.mark.parametrize("name", [B, "stranger"])
def test_aggregator_that_poses_as_a_site_is_refused(parties: Parties, name: str):
    """By a key of its own for a site of the roster, or for one that is not."""
    mine = parties.train(A)
    update = replace(mine, site=SiteId(name))
    cohort = cohort_of(1, mine, update)
    honest = parties.setup(cohort_of(1, mine, replace(mine, site=SiteId(B)))).contract
    fake = Member(
        number=2, site=SiteId(name), organisation=name, public_key=bytes(range(32))
    )
    contract = replace(
        honest, members=(honest.members[0], fake), partition=cohort.digest
    )
    half = AggregatorSetup(identity=parties.rehearsal.aggregator, contract=contract)
    answer = parties.step(
        A, SecureStep.ADVERTISE, write_free_offer(cohort, half.offer())
    )
    assert "sites of the roster" in refusal(answer)


def test_contract_with_other_members_than_the_cohort_is_refused(parties: Parties):
    mine = parties.train(A)
    cohort = cohort_of(1, mine, parties.train(B))
    other = parties.setup(cohort_of(1, mine, parties.train(C))).contract
    half = AggregatorSetup(
        identity=parties.rehearsal.aggregator,
        contract=replace(other, partition=cohort.digest),
    )
    body = write_free_offer(cohort, half.offer())
    said = refusal(parties.step(A, SecureStep.ADVERTISE, body))
    assert "members: this site's group is site-0, site-1" in said


def test_contract_of_all_sites_is_refused(parties: Parties):
    """What the job forms is bound: no other sum may have the update."""
    cohort = cohort_of(1, parties.train(A), parties.train(B))
    said = refusal(parties.offered(A, cohort, partition=b""))
    assert "partition" in said


def test_cohort_without_this_site_is_refused(parties: Parties):
    parties.train(A)
    others = cohort_of(1, parties.train(B), parties.train(C))
    assert "does not contain" in refusal(parties.offered(A, others))


@pytest.mark.parametrize(
    "change",
    [
        lambda mine: replace(mine, round_index=1, based_on=0),
        lambda mine: replace(mine, based_on=0),
        lambda mine: replace(mine, model_digest=hashlib.sha256(b"other").digest()),
    ],
    ids=["older", "age", "model"],
)
def test_update_that_the_site_does_not_keep_is_refused(parties: Parties, change: Any):
    """An older one was forgotten, and one of another age would weigh otherwise."""
    parties.train(A, 1)
    cohort = cohort_of(2, change(parties.train(A, 2)), parties.train(B, 1))
    assert "one that it keeps" in refusal(parties.offered(A, cohort))


def test_another_model_for_another_site_is_refused(parties: Parties):
    """All sites of a round were sent one model, as far as they are in one sum."""
    mine = parties.train(A)
    other = replace(
        parties.train(B), model_digest=hashlib.sha256(b"other model").digest()
    )
    said = refusal(parties.offered(A, cohort_of(1, mine, other)))
    assert "'site-1' was sent another model" in said


@pytest.mark.parametrize("site", [A, B])
def test_update_that_is_too_old_is_refused(parties: Parties, site: str):
    """Its own as well as another site's."""
    index = {A: 4, B: 4} | {site: 1}
    cohort = cohort_of(4, *(parties.train(each, index[each]) for each in (A, B)))
    said = refusal(parties.offered(A, cohort))
    assert f"of '{site}' is 3 models old" in said
    assert "schedule.max_staleness" in said


def test_operator_whom_the_noise_does_not_satisfy_takes_no_part(parties: Parties):
    seal: Any = parties.sites[A]._seal
    rule = replace(seal._protection.cohorts, is_private=False)
    seal._protection = replace(seal._protection, cohorts=rule)
    cohort = cohort_of(1, parties.train(A), parties.train(B))
    assert "policy.max_epsilon" in refusal(parties.offered(A, cohort))


def test_contract_without_record_level_privacy_is_refused(parties: Parties):
    """The job says that each site adds its own noise; so must the contract."""
    cohort = cohort_of(1, *map(parties.train, (A, B)), parties.train(C))
    terms = replace(
        parties.rehearsal.contract.differential_privacy,
        profile="site",
        ring_noise_std=0,
    )
    said = refusal(parties.offered(A, cohort, differential_privacy=terms))
    assert "differential_privacy.profile" in said


def test_sites_that_are_shown_other_cohorts_have_no_keys(parties: Parties):
    """One is told that the sum is for a later model, so that its update weighs less."""
    mine, other = parties.train(A), parties.train(B)
    half = parties.setup(cohort_of(1, mine, other))
    for site, index in ((A, 1), (B, 2)):
        cohort = cohort_of(index, mine, other)
        own = parties.setup(cohort)
        body = write_free_offer(cohort, own.offer())
        answer = parties.step(site, SecureStep.ADVERTISE, body)
        assert isinstance(answer, SecureAnswer)
        half._adverts[1 if site == A else 2] = answer.body
    book = Book(adverts=half._adverts).to_bytes()
    for site in (A, B):
        said = refusal(parties.step(site, SecureStep.CONFIRM, book))
        assert said.startswith("aggregator: ")


def test_keys_for_an_evaluation_seal_no_update(parties: Parties):
    mine = parties.train(A)
    evaluating = cohort_of(
        1, *(FinishedUpdate(site=SiteId(site), round_index=0) for site in (A, B))
    )
    keys = parties.keys(evaluating)
    said = refusal(parties.sealed(mine, keys))
    assert "does not train" in said
    assert parties.kept(A) is not None


def test_keys_for_an_update_evaluate_nothing(parties: Parties):
    """Its results would leave in a sum that was not made for them."""
    mine = parties.train(A)
    keys = parties.keys(cohort_of(1, mine, parties.train(B)))
    task = replace(parties.sealing(mine, keys), kind=TaskKind.EVALUATE)
    assert "does not evaluate" in refusal(parties.sites[A].handle(task))
    assert parties.kept(A) is not None


def test_evaluation_restores_what_the_site_has_kept_for_itself():
    """Its own last round left it: in a cohort there is no round of all."""
    model = {
        "factory": "clients.models:mlp",
        "options": {"inputs": 4, "classes": 3},
        "personal": ["*bias"],
    }
    parties = Parties(free_job(model=model))
    parties.train(A)
    evaluating = cohort_of(
        2, *(FinishedUpdate(site=SiteId(site), round_index=0) for site in (A, B))
    )
    keys = parties.keys(evaluating)
    trainer: Any = parties.sites[A]._current_trainer()
    evaluate, given = trainer.evaluate, list[set[str]]()

    def note(*args: Any, kept: Any, **named: Any) -> Any:
        given.append({*kept})
        return evaluate(*args, kept=kept, **named)

    trainer.evaluate = note
    answer = parties.sites[A].handle(parties.evaluating(A, 2, keys))
    assert isinstance(answer, MaskedUpdate)
    (names,) = given
    assert names


def test_another_clip_norm_is_refused(parties: Parties):
    mine = parties.train(A)
    keys = parties.keys(cohort_of(1, mine, parties.train(B)))
    task = parties.sealing(mine, keys)
    body = replace(train.read_train(task.secure), update_clip=0.5)
    answer = parties.sites[A].handle(replace(task, secure=train.write_train(body)))
    assert "asked to clip to 0.5" in refusal(answer)
