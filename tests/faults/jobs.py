"""A job for each kind of run: small, and every round of it changes the model."""

import math
from collections.abc import Sequence
from pathlib import Path

from faults.cells import Cell, Deed, Mode, Victim

from federation.job import job_file
from federation.job.spec import JobSpec

SITES = ("aws-us-east-1", "gcp-us-central1", "aws-eu-west-1", "on-premises")
STRUCK = SITES[1]  # The site that things happen to; it is in every job.
# In the clear two sites are as good as four, and so are they where all must answer and
# each is private by itself; where only the sum hides them, three are.
_NUM_SITES = {Mode.PLAIN: 2, Mode.P1: 3, Mode.P1_PRIVATE: 2}
_SHORTEST_SECONDS = 0.1  # Of a round on an idle machine.

DEADLINE_SECONDS = 60.0
# The aggregator waits so long for a site that may come back, then continues without.
RETURN_SECONDS = 90.0

_BEGINNING = """
seed = 7

[data]
source = "clients.data:digits"
partition = {{ kind = "dirichlet", alpha = 1.0 }}

[schedule]
round_deadline_seconds = {deadline}
max_lost_rounds = 8

[storage]
keep_checkpoints = 1000

[model]
{model}
"""
_SMALL = """factory = "clients.models:logistic_regression"
options = { inputs = 64, classes = 10 }"""
# 1.1 MB of weights: above the smallest threshold of the exchange.
_LARGE = """factory = "clients.models:mlp"
options = { inputs = 64, classes = 10, hidden = [3600] }"""

_TRAINING = """
[training]
local_steps = 10
batch_size = 32
optimizer = { name = "sgd", lr = 0.05 }
"""
# Every step takes all examples: under secure aggregation their order is each site's
# secret, which a replay does not have.
_IN_NO_ORDER = """
[training]
local_steps = 4
batch_size = 2000
optimizer = { name = "sgd", lr = 0.1 }
"""
_PRIVATE = """
[training]
local_steps = 4
batch_size = 128
optimizer = { name = "sgd", lr = 20.0 }

[aggregation]
weights = "uniform"

[privacy.differential_privacy]
unit = "record"
target_epsilon = 100.0
noise_multiplier = 2.0
clip_norm = 0.1
"""
_SECURE = """
[privacy.secure_aggregation]
enabled = true
max_examples = 1000
"""
_THRESHOLD = "threshold = 3\n"
_MODES = {
    Mode.PLAIN: _TRAINING,
    Mode.P1: _IN_NO_ORDER + _SECURE,
    Mode.P2: _IN_NO_ORDER + _SECURE + _THRESHOLD,
    Mode.P1_PRIVATE: _PRIVATE + _SECURE,
    Mode.P2_PRIVATE: _PRIVATE + _SECURE + _THRESHOLD,
}

# What a job of any kind promises is enough.
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
accept_dropouts = true
max_clip_norm = 100.0
max_epsilon = 1000.0
total_epsilon = 1000.0
"""


def sites_of(mode: Mode) -> Sequence[str]:
    """The sites of a job of this kind."""
    return SITES[: _NUM_SITES.get(mode, len(SITES))]


def text_of(*cells: Cell) -> str:
    """The job of a run in which these cells' deeds follow one another."""
    (mode,) = {cell.mode for cell in cells}
    is_large = any(cell.victim is Victim.STORE for cell in cells)
    return "\n".join(
        [
            f'name = "{mode}"',
            f"rounds = {3 + sum(map(_num_rounds, cells))}",
            _BEGINNING.format(
                deadline=DEADLINE_SECONDS, model=_LARGE if is_large else _SMALL
            ),
            _MODES[mode],
            *(f'[[sites]]\nname = "{site}"' for site in sites_of(mode)),
        ]
    )


def _num_rounds(cell: Cell) -> int:
    """Enough that a run has rounds before the deed, in the midst of it and after."""
    goes_on = cell.mode in {Mode.P2, Mode.P2_PRIVATE} and cell.victim is Victim.SITE
    if goes_on and cell.deed is not Deed.FULL:
        # Without the struck site, a round takes some tenths of a second.
        return 24 + round(2 * max(0.0, cell.seconds - RETURN_SECONDS))
    if cell.deed is Deed.FULL:
        return 12
    # Two, those of the moment before the deed and of a second after it, and one more.
    return 3 + math.ceil((cell.moment + 1.0) / _SHORTEST_SECONDS)


def load(path: Path, *settings: str) -> JobSpec:
    """Read a run's job, with other values for some keys."""
    return job_file.load(path, settings)
