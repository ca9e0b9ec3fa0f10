"""Wrong input to a secure run is refused by name; what is over leaves no key."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.secure_runs import (
    MASK,
    Answer,
    Spoilt,
    retrained,
    run,
    secure_job,
    step_of,
)
from support.without_report import simulate

from clients.privacy.ring_seal import RingSeal
from clients.training.site import Site
from federation import events
from federation.errors import QuorumNotMet
from federation.messages import RoundTask, SecureStep, SiteMessage, Task
from privacy.secagg.agreement.identity import generate
from privacy.secagg.agreement.policy import LocalPolicy
from privacy.secagg.protocol.train import read_train, write_train

pytestmark = pytest.mark.slow

SITE = "site-2"
# Evaluating the final model would be one more round, which erases this one.
NO_METRICS = {"evaluation": {"every": 0}}


def no_number(result: Any) -> Any:
    """Training that came to nothing that may be sent."""
    result.weights_d[0] = float("nan")
    return result


def with_policy(change: Callable[[LocalPolicy], LocalPolicy]) -> Callable[[Any], Any]:
    """A site whose operator demands something else."""

    def wrap(site: Site) -> Site:
        policy_of = site._seal._protection.policy_of  # type: ignore[attr-defined]
        site._seal._protection = replace(  # type: ignore[attr-defined]
            site._seal._protection,  # type: ignore[attr-defined]
            policy_of=lambda layout: change(policy_of(layout)),  # type: ignore[attr-defined]
        )
        return site

    return wrap


def with_key(site: Site) -> Site:
    """A site that holds another key than the roster pins."""
    other = generate(lambda count: bytes([7]) * count)
    site._seal._protection = replace(site._seal._protection, identity=other)  # type: ignore[attr-defined]
    return site


def newer_roster(policy: LocalPolicy) -> LocalPolicy:
    roster = policy.roster
    return replace(policy, roster=replace(roster, serial=roster.serial + 1))


def without_site(policy: LocalPolicy) -> LocalPolicy:
    sites = tuple(entry for entry in policy.roster.sites if entry.site != "site-4")
    return replace(policy, roster=replace(policy.roster, sites=sites))


SETUPS = {
    "wrong key": (with_key, "pins a different key"),
    "stale roster": (with_policy(newer_roster), "roster"),
    "unknown site": (with_policy(without_site), "roster"),
    "against the policy": (
        with_policy(lambda policy: replace(policy, max_clip_norm=0.5)),
        "clip_norm",
    ),
}


@pytest.mark.parametrize("case", SETUPS)
def test_setup_that_a_site_refuses_ends_the_run_before_any_training(
    case: str, caplog: pytest.LogCaptureFixture
):
    """Every site is needed: rounds are lost, and nobody was asked to train."""
    wrap, text = SETUPS[case]
    asked: list[Task] = []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        asked.append(task)
        return (answer(),)

    with pytest.raises(QuorumNotMet, match="no round was completed"):
        run(secure_job(rounds=9), wraps={SITE: wrap}, fault=fault)
    assert not any(isinstance(task, RoundTask) for task in asked)
    assert {getattr(task, "step", None) for task in asked} == {SecureStep.ADVERTISE}
    said = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(said) == 3
    assert all(text in line for line in said)


def with_certificate(change: Callable[[bytes], bytes]) -> Callable[[Any], Task]:
    def spoil(task: RoundTask) -> RoundTask:
        body = read_train(task.secure)
        body = replace(body, certificate=change(body.certificate))
        return replace(task, secure=write_train(body))

    return spoil


def flipped(data: bytes) -> bytes:
    at = len(data) - 1
    return data[:at] + bytes([data[at] ^ 1])


def other_model(task: RoundTask) -> RoundTask:
    return replace(task, weights_d=task.weights_d + task.weights_d.dtype.type(1e-3))


TASKS: dict[str, tuple[Callable[[Any], Task], str]] = {
    "certificate flipped": (with_certificate(flipped), "signature of the aggregator"),
    "certificate cut": (with_certificate(lambda data: data[:-1]), "malformed"),
    "certificate missing": (with_certificate(lambda _: b""), "malformed"),
    "model changed": (other_model, "is not the one that the certificate of round 1"),
    "number of a past round": (lambda task: replace(task, round_index=1), "round 1"),
    "number past the last": (lambda task: replace(task, round_index=99), "round 99"),
    "body cut": (lambda task: replace(task, secure=task.secure[:-1]), "malformed"),
    "other layout": (lambda task: replace(task, layout_digest="0" * 64), "layout"),
}


@pytest.mark.parametrize("case", TASKS)
@pytest.mark.parametrize("num_sites", [3, 5])
def test_wrong_task_costs_its_round_at_most(
    case: str, num_sites: int, caplog: pytest.LogCaptureFixture
):
    """The site says what is wrong and logs it; P1 loses the round, P2 the site."""
    change, text = TASKS[case]
    job = secure_job(num_sites, threshold=min(num_sites, 4))
    job = replace(job, schedule=replace(job.schedule, max_lost_rounds=3))
    wraps = {SITE: lambda site: Spoilt(site, task=change, round_index=2)}
    found = run(job, wraps=wraps)
    second = "completed" if num_sites == 5 else "lost"
    assert found.statuses() == ["completed", second, "completed"]
    assert SITE not in found.answered(2)
    assert SITE in found.answered(3)
    assert {site for site, _ in found.failures(2)} == {SITE}
    said = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert any(text in line for line in said)


@pytest.mark.parametrize("step", ["survivors", "reveal"])
def test_step_that_is_replayed_is_refused(step: str):
    """The site signs one list and reveals once; its answer counts all the same."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        first = answer()
        twice = step_of(task) == step and (task.site, task.round_index) == (SITE, 2)
        if twice:
            refused.append(answer())
        return (first,)

    refused: list[Any] = []
    found = run(secure_job(), fault=fault)
    (failure,) = refused
    assert failure.kind == "invalid"
    assert "is not due" in failure.message or "round is in progress" in failure.message
    assert SITE in found.answered(2)


def test_steps_in_another_order_are_refused():
    """A reveal before the survivors opens nothing and ends the site's round."""

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        if step_of(task) == "survivors" and (task.site, task.round_index) == (SITE, 2):
            early = replace(task, step=SecureStep.REVEAL)
            failures.append(sites[SITE].handle(early))
        return (answer(),)

    sites: dict[str, Site] = {}
    failures: list[Any] = []
    wraps = {SITE: lambda site: sites.setdefault(SITE, site)}
    found = run(secure_job(), wraps=wraps, fault=fault)
    assert "'reveal' is not due" in failures[0].message
    assert found.statuses() == ["completed"] * 3


def buffers_of(site: Site) -> list[bytearray]:
    """What a site's round has its secrets in: the memory itself, not copies."""
    current = site._seal._session and site._seal._session._round  # type: ignore[attr-defined]
    if current is None:
        return []
    shared = current.shared
    streams = (*current.masks.vector, *current.masks.header)
    receive = [key._buffer for key in shared.receive.values() if key._buffer]
    return [*(stream.key for stream in streams), *receive, shared.own]


def reachable_bytes(root: object) -> set[bytes]:
    """Contents of all bytes and byte arrays that can be reached, code apart."""
    code = (type, type(gc), type(run), type(run.__call__))
    seen, waiting, found = {id(root)}, [root], set()
    while waiting:
        current = waiting.pop()
        if isinstance(current, bytes | bytearray):
            found.add(bytes(current))
        for other in gc.get_referents(current):
            if id(other) not in seen and not isinstance(other, code):
                seen.add(id(other))
                waiting.append(other)
    return found


class Watched:
    """A site in its only round, with the secrets that it was seen to hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site: Site | None = None
        self.buffers: list[bytearray] = []
        self.contents: set[bytes] = set()
        original = RingSeal._work

        def work(seal: RingSeal, *args: Any) -> Any:
            if self.site is not None and self.site._seal is seal:
                self.look(self.site)
            return original(seal, *args)

        monkeypatch.setattr(RingSeal, "_work", work)

    def look(self, site: Site | None) -> None:
        """Take note of what the watched site holds now."""
        if site is None or site is not self.site:
            return
        now = buffers_of(site)
        self.buffers += now
        for buffer in filter(any, now):
            self.contents.add(bytes(buffer))
            pieces = range(0, len(buffer), 33)  # Shares, of an own bundle.
            self.contents |= {bytes(buffer[at : at + 33]) for at in pieces}

    def wrap(self, site: Site) -> Site:
        self.site = site
        return site

    def holds(self) -> int:
        """How many buffers still have a secret in them."""
        return sum(any(buffer) for buffer in self.buffers)

    def check_gone(self) -> None:
        assert self.contents
        assert self.holds() == 0
        assert not self.contents & reachable_bytes([self.site])


@pytest.mark.parametrize("case", ["P1", "P2", "declined"])
def test_no_secret_of_a_round_outlives_its_last_answer(
    case: str, monkeypatch: pytest.MonkeyPatch
):
    """By content, whatever would hold it, and overwritten where it was."""
    watched = Watched(monkeypatch)

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        message = answer()
        if task.site == SITE and step_of(task) is not None:
            watched.look(watched.site)
        return (message,)

    wraps: dict[str, Any] = {SITE: watched.wrap}
    if case == "declined":
        wraps[SITE] = lambda site: retrained(no_number)(watched.wrap(site))
    num_sites = 3 if case == "P1" else 5
    job = secure_job(num_sites, threshold=min(num_sites, 4), rounds=1, **NO_METRICS)
    found = run(job, wraps=wraps, fault=fault)
    assert (SITE in found.answered(1)) == (case != "declined")
    watched.check_gone()


@pytest.mark.parametrize("end", ["closed", "later round", "setup"])
def test_site_that_was_declared_missing_erases_at_the_next_sign_of_life(
    end: str, monkeypatch: pytest.MonkeyPatch
):
    """Nobody tells it: any message of a later round does, or the end of the run."""
    watched = Watched(monkeypatch)
    tasks: list[Any] = []

    def fault(task: Task, answer: Answer) -> Sequence[SiteMessage]:
        message = answer()
        if task.site != SITE:
            return (message,)
        tasks.append(task)
        if step_of(task) == MASK:
            watched.look(watched.site)
            return ()
        return (message,)

    job = secure_job(rounds=1, **NO_METRICS)
    run(job, wraps={SITE: watched.wrap}, fault=fault)
    site = watched.site
    assert site is not None
    assert watched.holds() > 0
    if end == "closed":
        site.close()
    elif end == "setup":
        site.handle(tasks[0])
    else:
        site.handle(replace(tasks[-1], round_index=2, secure=b""))
    watched.check_gone()


def test_closed_site_has_no_root_of_a_later_round():
    """What keys of rounds to come would be derived from."""
    sites: dict[str, Site] = {}
    wraps = {SITE: lambda site: sites.setdefault(SITE, site)}
    run(secure_job(rounds=1), wraps=wraps)
    roots = sites[SITE]._seal._session.secrets.roots.values()  # type: ignore[attr-defined]
    secrets = [getattr(pair, name) for pair in roots for name in ("_mask", "_channel")]
    contents = {bytes(secret.buffer) for secret in secrets}
    assert len(contents) == 2 * 4
    sites[SITE].close()
    assert all(secret.erased for secret in secrets)
    assert not contents & reachable_bytes([sites[SITE]])


def test_simulation_closes_its_sites(monkeypatch: pytest.MonkeyPatch):
    """Also when the run is stopped half-way."""
    closed: list[str] = []
    close = Site.close

    def noted(site: Site) -> None:
        closed.append(site.name)
        close(site)

    def stop(event: events.Event) -> None:
        if isinstance(event, events.RoundFinished):
            raise KeyboardInterrupt

    monkeypatch.setattr(Site, "close", noted)
    with pytest.raises(KeyboardInterrupt):
        simulate(secure_job(3, threshold=3), listeners=[stop])
    assert sorted(closed) == ["site-0", "site-1", "site-2"]
