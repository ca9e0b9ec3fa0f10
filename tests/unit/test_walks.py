"""The script that counts walks, on a product of three modules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "walks.py"
MODULES = {
    "deploy/run.py": """
from clients import site
from federation.spec import check, price

def simulate(job: JobSpec) -> None:
    check(job)
    _go_on(job)
    check(job)
    price(job.rounds, "of the job")
    site.Site(1).train(job)
    note("no job")

def _go_on(job: JobSpec) -> None:
    site.Site(job)

def note(text: str) -> None:
    site.unseen(text)
""",
    "clients/site.py": """
from federation.spec import check

class SiteSpec:
    total_epsilon: float

class Site:
    one: RoundTask

    def __init__(self, job: JobSpec) -> None:
        self._set_up(max_epsilon=1.0)

    def _set_up(self, max_epsilon: float) -> None:
        check(self)

    def handle(self, task: Task | SecureTask, update: SiteUpdate) -> list[Task]:
        ...

def unseen(job: JobSpec) -> None:
    check(job)
""",
    "federation/spec.py": """
def check(job: JobSpec) -> None:
    bounds(job, epsilon_cap=1)

def bounds(job: JobSpec, epsilon_cap: float) -> None:
    ...

def price(rounds: int, text: str) -> None:
    ...
""",
}
# simulate (3) check (0) bounds (0) back to check and simulate (3): the first climb.
# _go_on (3), Site (2) and _set_up (2), back to simulate (3): the second.
# price is given a part of the job, and a text that mentions it: no climb.
EXPECTED = """\
the job climbs 2 times, through 3 modules
a task has 2 names: one, task
  and is held by 1 classes: Site
an update has 1 names: update
  and is held by 0 classes:
epsilon's cap has 2 names: epsilon_cap, max_epsilon
  and the keys of files are: total_epsilon
"""


def test_walks_are_counted_from_imports_and_calls(tmp_path: Path) -> None:
    """Each function once; calls without the job and names in lists do not count."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.rstrip() for line in done.stdout.splitlines()] == EXPECTED.splitlines()


@pytest.mark.slow
def test_walks_through_the_product_are_short() -> None:
    """From `simulate` on; a limit that is reached is lowered to what was reached."""
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT], capture_output=True, text=True, check=True
    )
    climbs, modules, *names = map(int, re.findall(r"\d+", done.stdout))
    assert climbs <= 7
    assert modules <= 19
    task, _, update, _, cap = names
    assert (task, update, cap) == (1, 1, 1)
    assert (
        "keys of files are: max_epsilon, target_epsilon, total_epsilon" in done.stdout
    )
