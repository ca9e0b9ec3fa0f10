"""Every number that a site states before a run: in bounds, or refused in its name.

The numbers are enumerated from the messages, so that a new one without a bound fails.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support import agents
from support.agents import RUN_ID, Consortium, consortium
from support.small_jobs import small_job

from clients.privacy import stated_bounds
from deploy.aggregator_host.handshake import SignedHandshake
from federation.errors import FederationError
from federation.events import SitePrivacy
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.typed_json import encode
from federation.wire import frame as wire
from privacy.membership import introduction
from privacy.membership.introduction import Introduction
from privacy.secagg.agreement.identity import Label

pytestmark = pytest.mark.slow

NAMES = ("site-0", "site-1", "site-2", "site-3")
LIAR = SiteId("site-3")
HONEST = NAMES[:3]


def numbers_of(message: type[Any]) -> set[str]:
    """Names of a message's fields that are numbers, or may be."""
    kinds = typing.get_type_hints(message)
    return {
        each.name
        for each in fields(message)
        if {int, float} & {kinds[each.name], *typing.get_args(kinds[each.name])}
    }


INTRODUCED = numbers_of(Introduction) - {"version"}
WHOLE = {"num_examples", "num_held_out", "steps_per_round", "max_runs"}
PROMISED = numbers_of(SitePrivacy)


def job_of(unit: str, **private: Any) -> JobSpec:
    """Four sites with ten records each."""
    tables: dict[str, Any] = {}
    if unit != "none":
        tables["differential_privacy"] = {
            "unit": unit,
            "target_epsilon": 8.0,
            "held_out": "public" if unit == "site" else "noise",
            "accept_low_signal": unit == "site",
            **private,
        }
    if unit in {"joint", "site"}:
        tables["secure_aggregation"] = {"enabled": True}
    return small_job(
        num_sites=len(NAMES),
        rounds=2,
        training={"local_steps": 1, "batch_size": 8, "optimizer": {"lr": 0.5}},
        aggregation={"weights": "uniform"},
        privacy=tables,
    )


JOBS: Mapping[str, JobSpec] = {
    "none": job_of("none"),
    "record": job_of("record"),
    "record with its own noise": job_of("record", noise_multiplier=2.0),
    "joint": job_of("joint"),
    "joint with a bound": job_of("joint", max_noise_multiplier=3.0),
    "joint with its own noise": job_of("joint", noise_multiplier=2.0),
    "site": job_of("site"),
}
VALUES: tuple[float, ...] = (0, -1, -0.5, math.nan, math.inf, 1e300, 10**18, 1 << 70)


class Hall:
    """A handshake that all sites can answer, honestly or not."""

    def __init__(self, folder: Path, members: Consortium, job: JobSpec) -> None:
        self.members, self.job = members, job
        self.call = SignedHandshake.of(
            job, RUN_ID, aggregator=members.aggregator, roster=members.roster
        )
        self.agents = {name: agents.agent(folder, name, members) for name in NAMES}
        self.honest = self._answers()

    def _answers(self) -> dict[str, bytes]:
        question = self.call.question
        return {name: each.introduce(question) for name, each in self.agents.items()}

    def move_on(self) -> bool:
        """Go to the next question, with what all have answered in earnest."""
        for name, sealed in self.honest.items():
            assert self.call.site_of(sealed) == name
        if not self.call.move_on():
            return False
        self.honest = self._answers()
        return True

    def lie(self, field: str, value: float) -> bytes:
        """The liar's answer with another number in it, under its signature."""
        told: Any = encode(introduction.kept_introduction(self.honest[LIAR]))
        table = told if field in INTRODUCED else told["privacy"]
        table[field] = value
        body = json.dumps(told).encode()
        return self.members.sites[LIAR].sign(Label.PROMISE, body) + body

    def refusal(self, sealed: bytes) -> str:
        """Why an answer is refused; empty if it is taken.

        A site that was refused stays so: each answer is to a handshake of its own.
        """
        call = dataclasses.replace(self.call, absent=dict(self.call.absent))
        try:
            call.site_of(sealed)
        except FederationError as error:
            with pytest.raises(FederationError):
                call.site_of(sealed)
            return str(error)
        return ""

    def bounds(self, field: str) -> stated_bounds.Bounds | None:
        """What the job allows."""
        if field == "needs":
            if not self.job.privacy.differential_privacy.in_sum:
                return None  # Nothing reads it.
            most = stated_bounds.largest_need(self.job)
            given = self.job.privacy.differential_privacy.noise_multiplier
            return (given or math.ulp(0.0), most)
        if field == "max_runs":
            return (1, wire.MAX_COUNT)
        if field in INTRODUCED:
            most = 0 if self.job.privacy.differential_privacy.enabled else 1 << 48
            return (0, most)
        told = introduction.kept_introduction(self.honest[LIAR]).privacy
        assert told is not None
        return stated_bounds.promise_bounds(self.job, told)[field]


@pytest.fixture(params=JOBS)
def hall(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hall]:
    found = Hall(tmp_path, consortium(*NAMES), JOBS[request.param])
    yield found
    for each in found.agents.values():
        each.close()


def test_every_number_is_in_bounds_or_refused_in_its_own_name(hall: Hall):
    """Honest sites are taken before and after, and are never named."""
    tried = set()
    while True:
        told = introduction.kept_introduction(hall.honest[LIAR])
        names = sorted(PROMISED) if told.privacy else []
        names += sorted(INTRODUCED - {"needs"} | ({"needs"} if told.needs else set()))
        for name in names:
            bounds, tried = hall.bounds(name), tried | {name}
            edges = [] if bounds is None else [*bounds]
            beyond = [math.nextafter(edge, math.inf) for edge in edges[1:]]
            for value in (*VALUES, *edges, *beyond):
                said = hall.refusal(hall.lie(name, value))
                case = (name, value, said)
                assert not any(honest in said for honest in HONEST), case
                is_whole = name in WHOLE
                if is_whole and not isinstance(value, int):
                    assert said, case
                elif bounds is not None and bounds[0] <= value <= bounds[1]:
                    assert not said, case
                else:
                    assert "malformed" in said or LIAR in said, case
        if not hall.move_on():
            break
    private = hall.job.privacy.differential_privacy
    assert tried >= (PROMISED if private.enabled else set()) | {"num_examples"}
    assert ("needs" in tried) == private.in_sum


def test_promise_that_the_job_does_not_ask_for_is_refused(tmp_path: Path):
    """Nor does a job with a unit go without one."""
    halls = [
        Hall(tmp_path / unit, consortium(*NAMES), JOBS[unit])
        for unit in ("none", "record")
    ]
    plain, private = (
        introduction.kept_introduction(hall.honest[LIAR]) for hall in halls
    )
    for hall, told in zip(
        halls,
        (
            replace(plain, privacy=private.privacy),
            replace(private, privacy=None),
        ),
        strict=True,
    ):
        key = hall.members.sites[LIAR]
        said = hall.refusal(introduction.seal_introduction(told, key))
        assert f"'{LIAR}' makes" in said
        for each in hall.agents.values():
            each.close()
