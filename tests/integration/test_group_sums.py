"""A robust rule over sums of groups: runs with sites that lie, fail or come back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lying_sites import Lies, beside, weight_of
from support.secure_runs import Run, retrained, run, secure_job, silence
from support.without_report import simulate

from clients.privacy.site_memory import FileMemory
from clients.training.site import Site
from cloud_adapters.storage.memory import MemoryStore
from federation import events
from federation.errors import QuorumNotMet
from federation.ids import SiteId
from federation.job.spec import AggregationSpec, JobSpec
from federation.messages import SiteMessage, Task
from federation.vectors import norm
from monitoring.pages.report import render
from monitoring.views.run_fold import fold
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.groups import group_contract

LIAR = SiteId("site-0")
MEDIAN = {"combine": "median", "byzantine_sites": 1, "weights": "uniform"}


def grouped(num_sites: int = 9, **changes: Any) -> JobSpec:
    """A small job with three groups of three sites, one of which may be bad."""
    blobs = {"num_train": 300, "num_held_out": 60}
    data = {"source": "support.small_jobs:blobs", "options": blobs}
    changes = {
        "aggregation": MEDIAN,
        "groups": 3,
        "clip_norm": 1.0,
        "data": data,
    } | changes
    return secure_job(num_sites, **changes)


def scaled(factor: float) -> Any:
    """A site whose update is multiplied by a number, and clipped like any other."""

    def change(result: Any) -> Any:
        weights_d = result.weights_d
        weights_d *= np.float32(factor)
        return result

    return change


def groups_of(run: Run) -> list[list[str]]:
    """The groups that the sites of a run have drawn, by the contracts they hold."""
    held = {
        tuple(sorted(m.site for m in site._seal._session.contract.members))
        for site in run.sites.values()
    }
    return sorted(map(list, held))


def test_all_sites_are_in_three_sums():
    """Each holds the contract of its group, and all of them the same partition."""
    ran = run(grouped())
    assert ran.statuses() == ["completed"] * 3
    assert [len(group) for group in groups_of(ran)] == [3, 3, 3]
    sessions = [site._seal._session for site in ran.sites.values()]
    assert len({session.contract.partition for session in sessions}) == 1
    assert len({session.contract.digest for session in sessions}) == 3


def compared(run: Run) -> list[events.GroupsCompared]:
    return [e for e in run.seen if isinstance(e, events.GroupsCompared)]


def test_events_show_the_groups_and_which_one_stands_out():
    """A liar's group is further from the combined update than any other."""
    ran = run(grouped(clip_norm=8.0), wraps={LIAR: retrained(scaled(-50.0))})
    first = compared(ran)[0]
    assert sorted(map(list, first.groups)) == groups_of(ran)
    assert len(compared(ran)) == 3
    assert first.remarks == ("", "", "")
    far = max(zip(first.distances, first.groups, strict=True))
    assert LIAR in far[1]
    silent = run(grouped(15, groups=5), fault=silence("mask", [LIAR]))
    round_1 = compared(silent)[0]
    (at,) = [i for i, group in enumerate(round_1.groups) if LIAR in group]
    assert (round_1.norms[at], round_1.distances[at]) == (None, None)
    assert "missing: site-0" in round_1.remarks[at]
    page = render(fold(silent.seen), "", {}, figures=())
    assert "Distance from the combined" in page


def test_groups_are_a_cohort_at_each_site():
    """What a site remembers of sums is the group and not all sites."""
    ran = run(grouped())
    for name, site in ran.sites.items():
        rule = site._seal._protection.cohorts
        (known,) = rule.memory.read("cohorts")[rule.lineage]["cohorts"]
        assert name in known
        assert len(known) == 3


def test_equal_seeds_give_equal_groups_in_a_rehearsal():
    """So that two rules can be compared."""
    assert groups_of(run(grouped())) == groups_of(run(grouped(rounds=1)))
    assert groups_of(run(grouped())) != groups_of(run(grouped(seed=1)))


def test_median_of_groups_does_not_follow_a_liar():
    """Its group's mean is far off; with the mean over all sites the model follows."""
    lie = {LIAR: retrained(scaled(-50.0))}
    job = grouped(rounds=1, clip_norm=8.0)
    honest, robust = run(job), run(job, wraps=lie)
    secure = replace(job.privacy.secure_aggregation, groups=None)
    whole = replace(
        job,
        aggregation=AggregationSpec(weights="uniform"),
        privacy=replace(job.privacy, secure_aggregation=secure),
    )
    straight, moved = run(whole), run(whole, wraps=lie)
    by_median = norm(robust.state.weights_d - honest.state.weights_d)
    by_mean = norm(moved.state.weights_d - straight.state.weights_d)
    assert by_median < 0.2 * by_mean


def liar_of(lies: Lies) -> dict[str, Any]:
    return {LIAR: lies.told_by}


@pytest.mark.parametrize(
    "lies",
    [Lies(header=weight_of(-3.9)), Lies(vector=beside(1 << 30))],
    ids=["weight", "update"],
)
def test_sum_that_no_honest_site_makes_is_left_out_alone(lies: Lies):
    """The other groups' round counts; it names the group, and the run continues."""
    ran = run(grouped(), wraps=liar_of(lies))
    assert ran.statuses() == ["completed"] * 3
    (group,) = [group for group in groups_of(ran) if LIAR in group]
    (told,) = [text for text in ran.warnings() if "leaves out the sum" in text]
    assert told.startswith("round 2 ")
    assert f"the sum of {', '.join(group)}:" in told
    assert len(ran.answered(3)) == 9


def test_group_without_an_answer_is_left_out_if_others_suffice():
    """Five groups bear one bad site with one of them missing; three do not."""
    fault = silence("mask", [LIAR])
    five = run(grouped(15, groups=5), fault=fault)
    assert five.statuses() == ["completed"] * 3
    assert any("has no sum of site-0" in text for text in five.warnings())
    three = run(grouped(), fault=silence("mask", [LIAR]))
    assert three.statuses() == ["lost", "completed", "completed"]
    assert "2 of 3 groups have a sum" in three.warnings()[-1]


def test_rounds_of_a_liar_in_every_round_have_results():
    """Words that are garbage are found in the sum, and cost a group and not the run."""
    every = [
        Lies(vector=beside(1 << 30), round_index=index).told_by for index in (1, 2, 3)
    ]

    def wrap(site: Site) -> Any:
        for told_by in every:
            site = told_by(site)  # type: ignore[assignment]
        return site

    ran = run(grouped(), wraps={LIAR: wrap})
    assert ran.statuses() == ["completed"] * 3


def test_restarted_site_is_set_up_again_with_its_group():
    """The round in which it has no keys is lost to its group; then it has new ones."""

    class Forgets:
        def __init__(self, site: Site) -> None:
            self._inner = site
            self._done = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def handle(self, task: Task) -> SiteMessage:
            if task.round_index == 2 and not self._done:
                self._done = True
                self._inner.close()
            return self._inner.handle(task)

    ran = run(grouped(15, groups=5), wraps={LIAR: Forgets})
    assert ran.statuses() == ["completed"] * 3
    assert len(ran.answered(2)) == 14
    assert len(ran.answered(3)) == 15


def test_run_that_is_resumed_has_the_groups_of_before(tmp_path: Path):
    """A second process finds the draw in the sites' memory, whatever its dice say."""
    seen: list[events.Event] = []
    asked = iter([False, True])
    simulate(
        grouped(), folder=tmp_path, stop_requested=lambda: next(asked), listeners=[]
    )
    before = {
        path: path.read_bytes() for path in tmp_path.glob("sites/*/memory/groups.json")
    }
    assert len(before) == 9
    simulate(grouped(), folder=tmp_path, resume=True, listeners=[seen.append])
    assert before == {path: path.read_bytes() for path in before}
    ends = [e.status for e in seen if isinstance(e, events.RoundFinished)]
    assert ends == ["completed"] * 2


def test_site_that_has_lost_its_memory_costs_its_group(tmp_path: Path):
    """Most sites know the draw, so the others continue with the groups of before."""
    job = grouped(15, groups=5, rounds=2)
    asked = iter([False, True])
    simulate(job, folder=tmp_path, stop_requested=lambda: next(asked))
    memory = FileMemory(tmp_path / "sites" / LIAR / "memory")
    memory.update("groups", lambda _: {})
    seen: list[events.Event] = []
    simulate(job, folder=tmp_path, resume=True, listeners=[seen.append])
    (end,) = [e for e in seen if isinstance(e, events.RoundFinished)]
    assert (end.status, len(end.answered)) == ("completed", 12)
    (failed,) = [e for e in seen if isinstance(e, events.SiteFailed) if e.site == LIAR][
        :1
    ]
    assert "before groups were drawn" in failed.message


@pytest.mark.parametrize("step", ["commit", "draw"])
def test_site_that_blocks_the_draw_is_drawn_without(step: str):
    """It may be slow once. Then the others draw again; it is named, and not asked."""
    ran = run(grouped(10, rounds=4), fault=silence(step, [LIAR], times=2))
    assert ran.statuses() == ["lost", "lost", "completed", "completed"]
    told = [e for e in ran.seen if isinstance(e, events.SitesLeftOut)]
    assert [(e.round_index, e.sites) for e in told] == [(2, (LIAR,))]
    assert "not reveal its secret" in told[0].reasons[0]
    assert len(ran.answered(3)) == len(ran.answered(4)) == 9
    del ran.sites[LIAR]  # type: ignore[attr-defined]
    assert sorted(map(len, groups_of(ran))) == [3, 3, 3]


def test_site_that_is_slow_once_is_in_its_group():
    """The same commitments are opened in the next round."""
    ran = run(grouped(10), fault=silence("draw", [LIAR]))
    assert ran.statuses() == ["lost", "completed", "completed"]
    assert len(ran.answered(2)) == 10
    assert not any(isinstance(e, events.SitesLeftOut) for e in ran.seen)


def test_site_is_not_left_out_of_groups_that_would_be_too_small():
    """The run ends, and says which site to replace in the job."""
    with pytest.raises(QuorumNotMet, match="site-0: draw: never answered"):
        run(grouped(9), fault=silence("draw", [LIAR], times=9))


def test_draw_without_a_site_outlives_the_coordinator(tmp_path: Path):
    """Another one asks for the draw of those who were left."""
    store, asked = MemoryStore(), iter([False, False, True])
    job = grouped(10, rounds=4)
    fault = silence("draw", [LIAR], times=2)
    run(job, fault=fault, store=store, stop_requested=lambda: next(asked))
    again = run(job, store=store)
    assert again.statuses() == ["completed"] * 2
    assert LIAR not in again.answered(3)


def test_aggregator_that_offers_another_group_gets_no_key(
    monkeypatch: pytest.MonkeyPatch,
):
    """It divides the sites as it likes, and each site holds to what it has drawn."""

    def chosen(
        whole: Contract, group: Sequence[SiteId], digest: bytes, threshold: int
    ) -> Contract:
        names = sorted(member.site for member in whole.members)
        at = 3 * (names.index(group[0]) % 3)
        return group_contract(whole, names[at : at + 3], digest, threshold)

    monkeypatch.setattr("aggregator.group_sums.group_contract", chosen)
    with pytest.raises(QuorumNotMet, match="group is site-"):
        run(grouped(schedule={"max_lost_rounds": 1}))


def test_groups_of_two_are_summed_where_each_record_has_noise():
    """The other site of a group learns an update whose noise is its own site's."""
    made = grouped(
        rounds=1,
        training={
            "local_steps": 1,
            "batch_size": 10,
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
    )
    unit = {"unit": "record", "target_epsilon": 3.0, "delta": 1e-5}
    private = replace(made.privacy.differential_privacy, **unit)
    privacy = replace(made.privacy, differential_privacy=private)
    ran = run(replace(made, sites=made.sites[:6], privacy=privacy))
    assert ran.statuses() == ["completed"]
    assert [len(group) for group in groups_of(ran)] == [2, 2, 2]
    (end,) = [e for e in ran.seen if isinstance(e, events.RoundFinished)]
    assert 0 < (end.epsilon or 0) <= 3
