"""A model card tells what a run knows, and nothing that its sites keep."""

import dataclasses

import pytest
import tomli_w
from support import event_samples
from support.small_jobs import small_job

from federation.events import Event, RunStarted
from federation.job import job_file
from federation.messages import FailureKind
from monitoring.pages.model_card import ModelFile, model_card
from monitoring.views.run_fold import fold
from monitoring.views.run_view import RunView

MODEL = ModelFile(
    size=7_800, sha256="a5" * 32, num_tensors=2, num_values=1_930, types=("BF16", "F32")
)


def card_of(view: RunView, **tables: object) -> str:
    job = tomli_w.dumps(job_file.document(small_job(num_sites=2, **tables)))
    return model_card(view, job, MODEL)


def hidden(events: list[Event]) -> list[Event]:
    """The same run under secure aggregation."""
    return [
        dataclasses.replace(e, secure_aggregation=True)
        if isinstance(e, RunStarted)
        else e
        for e in events
    ]


def rows(card: str) -> dict[str, str]:
    """Second cells of all rows by their first ones."""
    cells = [line.split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {c[0].removeprefix("| "): c[1].removesuffix(" |") for c in cells}


def test_epsilon_has_its_terms():
    """Epsilon comes with unit, delta, relation and sampling; noise is marked."""
    card = card_of(fold(event_samples.private(1)))
    found = rows(card)
    assert found["unit"] == "`record`: any one training record of a site"
    assert found["epsilon"].startswith("7.92 of 8 at delta 1e-04 (one record added")
    assert found["holds against"] == event_samples.HOLDS_AGAINST["record"]
    assert found["accuracy"].startswith(r"\~35.00% +-1.5")
    assert card.startswith("---\ntags:\n- federated-learning\n- differential-privacy\n")


def test_sizes_are_told_of_open_runs_alone():
    """Where sites hide their updates, the card does not tell how much they hold."""
    open_run = event_samples.two_sites(1)
    view = fold(open_run)
    assert view.data is not None
    sizes = [f"| {share.train_examples:,} |" for share in view.data.shares]
    assert all(size in card_of(view) for size in sizes)
    for secret in (event_samples.private(1), hidden(open_run)):
        view = fold(secret)
        assert view.data is not None
        assert not any("examples |" in line for line in card_of(view).splitlines())
        assert "How much each site holds is not reported." in card_of(view)


def test_missed_rounds_are_counted_once():
    """Also if an answer comes late."""
    kinds = enumerate((FailureKind.DEADLINE, FailureKind.LATE), start=2)
    failures = tuple((index, event_samples.TWO_SITES[1], kind) for index, kind in kinds)
    script = event_samples.Script(rounds=3, failures=failures)
    assert rows(card_of(fold(event_samples.run(script))))["failures"] == "1 task"


@pytest.mark.parametrize("name", ["a|b", "a`b", "<script>", "a\nb"])
def test_text_of_the_run_is_no_markup(name: str):
    """It stays inside its code span, its cell and its line."""
    events = [
        dataclasses.replace(e, job_name=name, run_id=name)
        if isinstance(e, RunStarted)
        else e
        for e in event_samples.two_sites(1)
    ]
    card = card_of(fold(events))
    shown = name.replace("|", r"\|").replace("`", "'").replace("\n", " ")
    assert f"# `{shown}`\n" in card
    assert f"| run | `{shown}` |\n" in card


def test_batches_of_a_step_are_named_where_they_are_not_one():
    view = fold(event_samples.two_sites(1))
    growing = {"local_steps": 1, "accumulate": 2, "accumulate_from": [[3, 4], [6, 1]]}
    found = rows(card_of(view, rounds=8, training=growing))
    assert found["batch"] == "32 records; 2 per step, 4 from round 3, 1 from round 6"
    assert rows(card_of(view))["batch"] == "32 records"
