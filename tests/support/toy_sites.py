"""Sites without models, for tests of what is between them and the server.

They live in a module of their own because Flower's processes import them.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from federation.ids import SiteId
from federation.messages import (
    FailureKind,
    MaskedUpdate,
    MetricSums,
    Phase,
    RoundTask,
    SecureAnswer,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteMessage,
    SiteUpdate,
    Task,
    TaskKind,
)

# Rounds in which sites misbehave.
FAILING_ROUND = 1001
HANGING_ROUND = 1002
HANGING_SECONDS = 4.0

# Names a file: sites hang for as long as it is there.
HOLD = "CROSSFED_TOY_SITES_HOLD"


def hang() -> None:
    """Wait until the test lets go, or for a while where none holds."""
    held = os.environ.get(HOLD)
    if held is None:
        time.sleep(HANGING_SECONDS)
        return
    while Path(held).exists():
        time.sleep(0.02)


class EchoSite:
    """Answers immediately, with numbers that tell what it was asked."""

    def __init__(
        self,
        site: SiteId,
        job_text: str,
        *,
        hang: Callable[[], None] = hang,
    ) -> None:
        """Make a site; it says its job's text back, and hangs by ``hang``."""
        self._hang = hang
        self._site = site
        self._job_text = job_text

    def handle(self, task: Task) -> SiteMessage:
        """Answer, except where this round is for failing or hanging."""
        about = {
            "run_id": task.run_id,
            "round_index": task.round_index,
            "site": self._site,
        }
        if self._site.endswith("-bad"):
            if task.round_index == FAILING_ROUND:
                text = f"no disk for {self._job_text}"
                return SiteFailure(**about, kind=FailureKind.CRASHED, message=text)
            if task.round_index == HANGING_ROUND:
                self._hang()
        if isinstance(task, SecureTask):
            return SecureAnswer(**about, step=task.step, body=task.body[::-1])
        about |= {"based_on": task.based_on, "fragment": task.fragment}
        sums = MetricSums(
            count=10, loss_sum=0.1, metrics={"correct": len(self._job_text)}
        )
        phases = (Phase(name="echo", start_seconds=0.25, seconds=0.5),)
        if task.kind is TaskKind.EVALUATE:
            return SiteEvaluation(**about, evaluation=sums, phases=phases)
        if task.secure:
            return MaskedUpdate(
                **about,
                layout_digest=task.layout_digest,
                words=task.weights_d[::-1].copy().view(np.uint8),
                header_h=task.integers_m.view(np.uint64) + np.uint64(1),
                body=task.secure[::-1],
            )
        return SiteUpdate(
            **about,
            layout_digest=task.layout_digest,
            delta_d=np.array(task.weights_d[::-1]),
            integers_m=task.integers_m + 1,
            num_examples=sum(self._site.encode()),
            num_steps=task.round_index,
            training=sums,
            evaluation=sums if task.evaluate else None,
            evaluation_after=sums if task.evaluate_after else None,
            phases=phases,
        )


def echo_site(site: SiteId, job_text: str) -> EchoSite:
    """Build a site, as an engine does where the site lives."""
    return EchoSite(site, job_text)


def mirrored(task: RoundTask) -> SiteUpdate:
    """Answer with the model itself, uncopied."""
    return SiteUpdate(
        run_id=task.run_id,
        round_index=task.round_index,
        site=task.site,
        layout_digest=task.layout_digest,
        delta_d=task.weights_d,
        integers_m=task.integers_m,
        num_examples=1,
        num_steps=1,
        training=None,
        evaluation=None,
        evaluation_after=None,
        phases=(),
        based_on=task.based_on,
        fragment=task.fragment,
    )


class FaultySite(EchoSite):
    """Misbehaves in ways that its name tells."""

    def handle(self, task: Task) -> SiteMessage:
        """Answer, if at all, not as a site should."""
        answer = super().handle(task)
        match self._site:
            case "dies" if task.round_index == 1:
                os._exit(3)
            case "raises":
                raise KeyError("lost")
            case "lies":
                return replace(answer, site=SiteId("honest"))
        return answer


def faulty_site(site: SiteId, job_text: str) -> FaultySite:
    """Build a site, unless it is one that cannot be built."""
    if site == "unbuilt":
        raise RuntimeError("no data here")
    return FaultySite(site, job_text)
