"""What an operator wants to be woken by: pure functions of numbers and the time.

An alert has a key. As long as its cause lasts it has the same key, and who delivers
alerts tells each key once; when the cause has gone and comes back, once more.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from textwrap import shorten

from monitoring.privacy_words import NOISY, plus_minus
from monitoring.runs.run_numbers import RunNumbers
from monitoring.units import format_count, format_duration, format_number
from monitoring.views.round_view import RUNNING
from monitoring.views.run_view import COMPLETED, EXHAUSTED

STALL_FACTOR, MIN_STALL_SECONDS = 3.0, 60.0
SILENT_ROUNDS = 3  # In a row, without an answer.
BUDGET_SHARES = (1.0, 0.8)  # The larger first: only one is told.
WORSE_EVALUATIONS = 3  # In a row.
EXPIRY_SECONDS = 3 * 86_400.0
MAX_ADDRESSES = 8  # With an alert of their own.
MAX_REASON_CHARS = 600
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that a person should know now.

    Attributes:
        key: What it is about; the same while it lasts.
        text: What happened, where, and what to do.
        crowd: Alerts of one crowd that come together are told in one message; empty
            for one that is always told alone.
        member: Who in the crowd it is about.
    """

    key: str
    text: str
    crowd: str = ""
    member: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What is known of the aggregator's host.

    Attributes:
        free_bytes: Free space of its disk.
        reserve_bytes: Space below which it refuses answers.
        expires: When each certificate ends, seconds since 1970, by whose it is.
        knocks: Revoked certificates that somebody used since the last look, by address.
    """

    free_bytes: int
    reserve_bytes: int
    expires: Mapping[str, float]
    knocks: Mapping[str, int]


def of_run(
    name: str,
    run: RunNumbers,
    now: float,
    *,
    status: str = "",
    reason: str = "",
    revoked: Collection[str] = (),
) -> Iterator[Alert]:
    """Yield the alerts of a run.

    Args:
        name: What commands call it.
        run: Its numbers.
        now: Seconds since 1970.
        status: How it ended, if that is known from elsewhere: a coordinator that was
            killed, or never began, writes no last event.
        reason: Why, as far as that is known.
        revoked: Names of sites that were revoked: that they are silent is no news.
    """
    about = f"run {name} ({run.job})"
    status = status or run.status
    if status == "failed":
        # What to do comes after it, and must not be cut off.
        reason = shorten(reason or run.reason, MAX_REASON_CHARS, placeholder=" ...")
        why = (
            f": {reason.rstrip('.')}. "
            if reason
            else f". crossfed logs {name} says why. "
        )
        advice = (
            "crossfed run JOB --resume continues from its newest checkpoint."
            if run.ended[COMPLETED]
            else "It completed no round: fix that, and submit it again with crossfed "
            "run JOB."
        )
        if "--resume" in reason or "new run" in reason:
            advice = ""  # The reason says what its run allows.
        text = f"{about} has failed{why}{advice}".rstrip()
        yield Alert(key=f"{name}/failed", text=text, crowd="failed", member=name)
    yield from _of_budget(name, about, run, is_exhausted=status == EXHAUSTED)
    if status != RUNNING:
        return
    yield from _of_round(name, about, run, now)
    for site, rounds in run.silent.items():
        if rounds >= SILENT_ROUNDS and site not in revoked:
            yield Alert(
                key=f"{name}/silent/{site}",
                text=f"{about}: site {site} has missed {rounds} rounds in a row. See "
                "whether crossfed aggregator sites shows it as connected; its log "
                "says more.",
                crowd=f"{name}/silent",
                member=site,
            )
    yield from _of_loss(name, about, run)


def _of_round(name: str, about: str, run: RunNumbers, now: float) -> Iterator[Alert]:
    began, usual = (
        run.values.get("round_started_timestamp_seconds"),
        max(run.recent_seconds, default=math.inf),
    )
    if began is None or run.is_between_rounds:
        return
    took = now - began
    if took > max(MIN_STALL_SECONDS, STALL_FACTOR * usual):
        index = int(run.values["round"])
        yield Alert(
            key=f"{name}/stalled/{index}",
            text=f"{about}: round {index} goes on for {format_duration(took)}; "
            f"the last ones took at most {format_duration(usual)}. crossfed watch "
            f"{name} names the sites that it waits for.",
            crowd="stalled",
            member=name,
        )


def _of_budget(
    name: str, about: str, run: RunNumbers, *, is_exhausted: bool
) -> Iterator[Alert]:
    """Alert where the budget will not last: a run that goes to plan may spend it all.

    Epsilon grows ever more slowly, so that the cost of the last round is an upper bound
    of that of others: half of the rounds that are left leaves room for that.
    """
    spent, cap = run.values.get("epsilon"), run.values.get("epsilon_cap")
    if spent is None or not cap or run.rounds_affordable >= run.rounds_left / 2:
        return
    then = (
        f"that lasts for about {math.floor(run.rounds_affordable)} of the "
        f"{run.rounds_left} rounds left. The run then ends with the last model that "
        "the budget allows."
    )
    if is_exhausted:
        then = (
            f"the run has ended, with {run.rounds_left} rounds left. Its model is the "
            "last one that the budget allowed."
        )
    for share in BUDGET_SHARES:
        # The round that would have reached the cap was refused.
        if spent >= share * cap or is_exhausted:
            yield Alert(
                key=f"{name}/epsilon/{share}",
                text=f"{about} has spent epsilon {format_number(spent)} of "
                f"{format_number(cap)} ({spent / cap:.0%}): {then}",
            )
            return


def _of_loss(name: str, about: str, run: RunNumbers) -> Iterator[Alert]:
    if run.is_not_finite:
        yield Alert(
            key=f"{name}/loss/nan",
            text=f"{about}: the held-out loss is not a finite number. Stop it with "
            f"crossfed stop {name}, and lower the learning rate.",
        )
    elif run.worse >= WORSE_EVALUATIONS:
        yield Alert(
            key=f"{name}/loss/rising",
            text=f"{about}: the held-out loss is "
            f"{_with_noise(run.values['loss'], run.values.get('loss_noise', 0.0))}, "
            f"and its best was {_with_noise(run.best_loss, run.best_noise)}. "
            f"Look at its curve, and stop it with crossfed stop {name} if it diverges.",
        )


def _with_noise(loss: float, noise: float) -> str:
    text = format_number(loss)
    return f"{NOISY}{text}{plus_minus(noise)}" if noise else text


def of_caps(
    name: str, used: Mapping[str, tuple[float, float | None]]
) -> Iterator[Alert]:
    """Yield the alerts of a deployment's caps.

    Args:
        name: The deployment's.
        used: What is used and the cap, None for no cap, by key of its file.
    """
    for key, what, share, words in _reached(used):
        then = "All machines end" if share == 1 else "At 100 % machines end"
        yield Alert(
            key=f"{name}/{what}",
            text=f"deployment {name} {words}. {then}, and the run can be resumed: "
            f"raise {key} in the deployment file, and run crossfed up --keep again.",
        )


def of_quotas(
    owner: str, used: Mapping[str, tuple[float | None, float | None]]
) -> Iterator[Alert]:
    """Yield the alerts of an owner's quotas.

    Args:
        owner: The name.
        used: What all runs have used and may use, None for what is not known or not
            limited, by quota.
    """
    for key, what, share, words in _reached(used):
        then = "Its runs wait" if share == 1 else "At 100 % its runs wait"
        yield Alert(
            key=f"owner {owner}/{what}",
            text=f"owner {owner} {words}. {then}, until you raise it: crossfed "
            f"aggregator owners add {owner} --quota {key}=...",
        )


def _reached(
    used: Mapping[str, tuple[float | None, float | None]],
) -> Iterator[tuple[str, str, float, str]]:
    """What is nearly or all used: its key, for the alert's, the larger share, words.

    A cap that was raised is another cause, told again however soon it is reached.
    """
    for key, (spent, cap) in used.items():
        reached = [s for s in BUDGET_SHARES if spent and cap and spent >= s * cap]
        if spent and cap and reached:
            amount = f"{spent:,.2f}" if cap >= 1 else f"{spent:.3g}"
            words = f"has used {amount} of {key} = {cap:g} ({spent / cap:.0%})"
            yield key, f"{key}/{cap:g}/{reached[0]}", reached[0], words


def of_host(facts: HostFacts, now: float) -> Iterator[Alert]:
    """Yield the alerts of the aggregator's host."""
    if facts.free_bytes < 2 * facts.reserve_bytes:
        yield Alert(
            key="host/disk",
            text=f"the aggregator's disk has {facts.free_bytes // _MIB} MiB free, "
            f"and refuses answers below {facts.reserve_bytes // _MIB} MiB. Free some "
            "space, for example with crossfed checkpoints prune.",
        )
    for whose, ends in facts.expires.items():
        if ends - now < EXPIRY_SECONDS:
            left = format_duration(max(0.0, ends - now))
            yield Alert(
                key=f"host/certificate/{whose}/{ends:.0f}",
                text=f"the certificate of {whose} ends in {left}. Agents renew theirs "
                "while they run: see that this one does, or invite it again.",
                crowd="host/certificate",
                member=whose,
            )
    addresses = [*facts.knocks]
    if len(addresses) > MAX_ADDRESSES:
        yield Alert(
            key="host/revoked",
            text=f"somebody used revoked certificates {sum(facts.knocks.values())} "
            f"times, at {len(addresses)} addresses such as {addresses[0]}. If they "
            "are of sites that you revoked, have their agents stopped; otherwise their "
            "keys are in foreign hands.",
        )
        return
    for address, times in facts.knocks.items():
        yield Alert(
            key=f"host/revoked/{address}",
            text=f"somebody at {address} used a revoked certificate "
            f"{format_count(times, 'time')}. If it is a site that you revoked, have "
            "its agent stopped; otherwise its key is in foreign hands.",
        )
