"""``crossfed tune``: a search over a job's keys."""

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients.user_code import unable_to_exit
from cloud_adapters.extras import naming_extras
from deploy.cli.simulate_verb import stop_on_signal
from deploy.cli.terminal import say, say_json, tell
from deploy.exit_codes import DONE, FAILED, STOPPED
from federation.epsilon_text import format_epsilon

if TYPE_CHECKING:
    from deploy.tuning.selecting import SelectionRelease
    from deploy.tuning.space import Space
    from monitoring.pages.tuning_page import Tuning

ROOT = Path("searches")


def _tune(options: argparse.Namespace) -> int:
    from deploy.tuning import space as spaces  # noqa: PLC0415 -- keeps `--help` fast

    space = spaces.load(options.space)
    folder = options.out or ROOT / space.spec.name
    with naming_extras(), stop_on_signal() as stop, unable_to_exit():
        from deploy.tuning.search import Search  # noqa: PLC0415 -- imports torch

        search = Search(
            space=space,
            folder=folder,
            say=tell,
            clock=options.clock,
            stop_requested=stop,
            workers=options.workers,
        )
        found = search.run()
        selected = search.select(found)
        was_stopped = stop()
    if options.json:
        say_json(_document(found, folder, selected))
    else:
        _print(found)
        if selected is not None:
            _print_selected(selected)
        elif found.wanted == 0:  # With a Poisson number.
            tell("no trial was drawn, so there is nothing to select")
        elif found.best is not None:
            say(f"train it    {_command(space, found.best.values)}")
    if was_stopped:
        tell("stopped: the same command continues the search")
        return STOPPED
    return DONE if found.best is not None else FAILED


def _document(
    found: "Tuning", folder: Path, selected: "SelectionRelease | None"
) -> dict[str, Any]:
    return {
        "selected": None if selected is None else _facts(selected),
        "name": found.name,
        "metric": found.metric,
        "goal": found.goal,
        "best": None if found.best is None else found.best.number,
        "trials": [
            {
                "number": trial.number,
                "state": trial.state,
                "values": dict(trial.values),
                "value": trial.value,
                "last": trial.last,
                "rounds": trial.rounds,
                "reason": trial.reason,
                "folder": str(trial.folder),
            }
            for trial in found.trials
        ],
        "importance": dict(found.importance),
        "epsilon": found.epsilon,
        "delta": found.delta,
        "folder": str(folder),
        "page": str(found.page),
    }


def _facts(selected: "SelectionRelease") -> dict[str, Any]:
    found = selected.cost
    return {
        "folder": str(selected.folder),
        "epsilon": found.epsilon,
        "composed_epsilon": found.composed,
        "delta": found.delta,
        "distribution": found.distribution,
        "expected_trials": found.mean,
    }


def _print_selected(selected: "SelectionRelease") -> None:
    found = selected.cost
    terms = f"at delta {found.delta:.2g}"
    say(f"selected    {selected.folder}")
    epsilon, composed = format_epsilon(found.epsilon), format_epsilon(found.composed)
    say(
        f"            epsilon {epsilon} {terms} for those who see nothing "
        f"else of this search ({found.distribution}, {found.mean:g} trials expected)"
    )
    say(
        f"            epsilon {composed} {terms} for those who see all "
        f"of {found.mean:g} trials"
    )


def _command(space: "Space", values: Mapping[str, Any]) -> str:
    """How to run a job with some values, as a shell takes it."""
    words = ["crossfed", "simulate", str(space.path)]
    for name, value in values.items():
        words += ["--set", f"{name}={json.dumps(value)}"]
    if space.spec.engine != "inproc":
        words += ["--engine", space.spec.engine]
    return shlex.join(words)


def _print(found: "Tuning") -> None:
    best = found.best
    if best is not None:
        say(f"best        trial {best.number + 1}: {found.metric} {best.value:.4f}")
        for name, value in best.values.items():
            say(f"            {name} = {value}")
        say(f"run         {best.folder}")
    if found.epsilon is not None:
        spent = f"epsilon {format_epsilon(found.epsilon)} at delta {found.delta:.2g}"
        say(f"privacy     {spent}, of all trials together")
    say(f"page        {found.page}")


VERBS = {"tune": _tune}
