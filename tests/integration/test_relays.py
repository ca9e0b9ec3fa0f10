"""Runs whose sites are behind relays, honest ones and others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.secure_runs import Run, run, secure_job
from support.small_jobs import small_job
from support.without_report import simulate

from aggregator.relay import SecureRelay
from federation import events
from federation.job.spec import JobSpec
from federation.messages import MaskedUpdate, RelayedSum, SiteMessage, Task
from privacy.secagg.agreement.identity import generate
from privacy.secagg.arithmetic.accumulator import sum_words
from privacy.secagg.protocol.messages import MaskedAnswer, RelayedHead

pytestmark = pytest.mark.slow

NUM_SITES, LOST = 8, 2
NAMES = [f"site-{number}" for number in range(NUM_SITES)]
RELAYS = [{"name": f"relay-{i}", "sites": NAMES[2 * i : 2 * i + 2]} for i in range(4)]
Combined = tuple[RelayedSum | None, list[SiteMessage]]


def relayed(**tables: Any) -> JobSpec:
    """Four clouds of two sites."""
    given = {"relays": RELAYS, "rounds": 3} | tables
    return small_job(num_sites=NUM_SITES, schedule={"minimum_sites": 6}, **given)


def secret(**tables: Any) -> JobSpec:
    """The same under secure aggregation, which bears the loss of a relay."""
    return secure_job(NUM_SITES, threshold=6, **({"relays": RELAYS} | tables))


def line(**keys: Any) -> dict[str, Any]:
    return {"simulation": {"relays": [{"relay": "relay-1", **keys}]}}


def finished(seen: Sequence[events.Event]) -> list[events.RoundFinished]:
    return [event for event in seen if isinstance(event, events.RoundFinished)]


def test_model_is_that_of_the_flat_run():
    """Up to the order of additions; and the same bits in each run with relays."""
    flat, first, second = (run(job) for job in (relayed(relays=[]), *[relayed()] * 2))
    one, other = first.state.weights_d, second.state.weights_d
    assert one.tobytes() == other.tobytes()
    np.testing.assert_allclose(one, flat.state.weights_d, rtol=0, atol=1e-6)
    on_lines = [e.bytes_up for e in finished(flat.seen)]
    assert [e.inside_up for e in finished(first.seen)] == on_lines


def test_one_update_leaves_each_cloud():
    """Of a model that is large beside the headers: half the bytes with two sites."""
    digits = {
        "model": {"factory": "clients.models:digits_cnn"},
        "data": {"source": "clients.data:digits"},
        "rounds": 1,
    }
    (one,) = finished(run(relayed(**digits)).seen)
    assert one.bytes_up < 0.51 * one.inside_up
    assert one.bytes_down < 0.51 * one.inside_down


@pytest.mark.parametrize("keys", [{}, {"ring_bits": 24}, {"levels": 4}])
def test_secure_sum_is_that_of_the_sites(
    keys: dict[str, Any],
):
    """A relay's masked words, and the model, are those of a run without relays."""
    ring = {"clip_norm": 10.0, **keys}
    flat = run(secret(relays=[], **ring))
    first = run(secret(**ring))
    assert first.statuses() == flat.statuses() == ["completed"] * 3
    tolerance = 0.2 if "levels" in keys else 1e-4
    np.testing.assert_allclose(
        first.state.weights_d, flat.state.weights_d, rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("job", [relayed, secret])
def test_lost_relay_is_the_absence_of_its_sites(job: Callable[..., JobSpec]):
    found = run(job(**line(lost_rounds=[LOST])))
    assert found.statuses() == ["completed"] * 3
    assert {*found.answered(LOST)} == {*NAMES} - {"site-2", "site-3"}
    assert {site for site, _ in found.failures(LOST)} == {"site-2", "site-3"}
    assert len(found.answered(LOST + 1)) == NUM_SITES


def corrupted(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[SecureRelay, Combined], Combined]
) -> Run:
    """A run whose second relay does something else with its sites' sums."""
    honest = SecureRelay.__call__

    def combine(
        self: SecureRelay, tasks: Sequence[Task], answers: Sequence[SiteMessage]
    ) -> Combined:
        found = honest(self, tasks, answers)
        through, _ = found
        is_second = self.name == "relay-1" and tasks[0].round_index == LOST
        return spoil(self, found) if through and is_second else found

    monkeypatch.setattr(SecureRelay, "__call__", combine)
    return run(secret())


def test_relay_with_another_key_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A sum that the pinned relay did not sign is not added: its sites are absent."""

    def impostor(relay: SecureRelay, found: Combined) -> Combined:
        through, answers = found
        assert through is not None
        assert isinstance(through.update, MaskedUpdate)
        head = RelayedHead.from_bytes(through.update.body)
        forged = replace(head).signed_by(generate(lambda size: bytes([7]) * size))
        total = replace(through.update, body=forged.to_bytes())
        return replace(through, update=total), answers

    found = corrupted(monkeypatch, impostor)
    assert found.statuses() == ["completed"] * 3
    assert {*found.answered(LOST)} == {*NAMES} - {"site-2", "site-3"}
    assert all("relay 'relay-1'" in text for _, text in found.failures(LOST))


def test_relay_that_changes_words_after_signing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    def change(relay: SecureRelay, found: Combined) -> Combined:
        through, answers = found
        assert through is not None
        assert isinstance(through.update, MaskedUpdate)
        words = through.update.words.copy()
        words[0] ^= 1
        return replace(through, update=replace(through.update, words=words)), answers

    found = corrupted(monkeypatch, change)
    assert {*found.answered(LOST)} == {*NAMES} - {"site-2", "site-3"}
    assert all("signed another sum" in text for _, text in found.failures(LOST))


def test_relay_that_leaves_out_words_of_a_listed_site_loses_the_round(
    monkeypatch: pytest.MonkeyPatch,
):
    """Masks of the site that is missing do not cancel: no sum is opened."""
    add = "aggregator.relay.sum_words"
    calls = []

    def without_the_last(many: Any, **keys: Any) -> Any:
        calls.append(1)
        words = [*many]
        is_bad = len(calls) == 4 + 2  # The second relay, in the second round.
        return sum_words(words[:-1] if is_bad else words, **keys)

    monkeypatch.setattr(add, without_the_last)
    found = run(secret())
    assert found.statuses() == ["completed", "lost", "completed"]


def test_site_that_deals_wrong_shares_is_absent_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its relay checks them before it adds: its neighbour counts."""
    honest = SecureRelay.__call__

    def combine(
        self: SecureRelay, tasks: Sequence[Task], answers: Sequence[SiteMessage]
    ) -> Combined:
        first, *others = answers
        is_second = self.name == "relay-1" and tasks[0].round_index == LOST
        if is_second and isinstance(first, MaskedUpdate):
            masked = MaskedAnswer.from_bytes(first.body)
            sealed = {site: each[::-1] for site, each in masked.sealed.items()}
            spoilt = replace(masked, sealed=sealed)
            answers = [replace(first, body=spoilt.to_bytes()), *others]
        return honest(self, tasks, answers)

    monkeypatch.setattr(SecureRelay, "__call__", combine)
    found = run(secret())
    assert found.statuses() == ["completed"] * 3
    assert {*found.answered(LOST)} == {*NAMES} - {"site-2"}
    ((site, text),) = found.failures(LOST)
    assert site == "site-2"
    assert "those that it signed" in text


def test_wrong_head_of_a_site_makes_its_relay_absent_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    """One answer that does not belong to the round: none of this sum counts."""

    def twist(relay: SecureRelay, found: Combined) -> Combined:
        through, answers = found
        first = answers[0]
        assert isinstance(first, MaskedUpdate)
        return through, [replace(first, body=b"nothing"), *answers[1:]]

    found = corrupted(monkeypatch, twist)
    assert found.statuses() == ["completed"] * 3
    assert {*found.answered(LOST)} == {*NAMES} - {"site-2", "site-3"}


def test_relay_does_not_pass_one_answer_off_as_that_of_two(
    monkeypatch: pytest.MonkeyPatch,
):
    """The sum is of the first site alone, and the second is listed beside it."""
    honest = SecureRelay.__call__

    def combine(
        self: SecureRelay, tasks: Sequence[Task], answers: Sequence[SiteMessage]
    ) -> Combined:
        is_second = self.name == "relay-1" and tasks[0].round_index == LOST
        if not is_second or not isinstance(answers[0], MaskedUpdate):
            return honest(self, tasks, answers)
        through, (first,) = honest(self, tasks[:1], answers[:1])
        assert through is not None
        assert isinstance(first, MaskedUpdate)
        sites = first.site, answers[1].site
        return replace(through, sites=sites), [replace(first, site=sites[1]), first]

    monkeypatch.setattr(SecureRelay, "__call__", combine)
    found = run(secret())
    assert found.statuses() == ["completed"] * 3
    assert {*found.answered(LOST)} == {*NAMES} - {"site-2", "site-3"}


@pytest.mark.parametrize("job", [relayed, secret])
def test_bytes_and_time_are_as_predicted(job: Callable[..., JobSpec]):
    machines = [{"site": name, "examples_per_second": 1000.0} for name in NAMES]
    lines = [
        {
            "relay": f"relay-{i}",
            "up_mbit": 0.1,
            "latency_seconds": 0.3,
        }
        for i in range(4)
    ]
    seen: list[events.Event] = []
    tables = {"machines": machines, "relays": lines}
    simulate(job(simulation=tables), engine="virtual", listeners=[seen.append])
    (told,) = [event for event in seen if isinstance(event, events.CostPredicted)]
    (end,) = [event for event in seen if isinstance(event, events.RunFinished)]
    assert end.seconds == pytest.approx(told.seconds)
    up = sum(e.bytes_up for e in finished(seen))
    steps = [e for e in seen if isinstance(e, events.ModelEvaluated | events.StepTaken)]
    last = finished(seen)[-1]
    after = [e for e in steps if seen.index(e) > seen.index(last)]
    up += sum(sum(e.bytes_up) for e in after)
    assert told.bytes_up[0] <= up <= told.bytes_up[1]
