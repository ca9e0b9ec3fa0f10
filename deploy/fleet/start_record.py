"""When a start was first asked for, kept for the next command.

``start.at_latest_hours`` counts from the first ``crossfed up`` that waits. Its machine
may restart, or a person may run the command again: that must not restart the wait.
The record is removed when the machines of the deployment have been started, and by
``crossfed down``: a command that is killed before that has started nothing for good.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cloud_adapters.storage.disk.part_file import file_errors
from deploy.fleet.deployment_file import DeploymentPlan
from federation import durable_json

_NAME = "start.json"
_DAMAGED = "delete it: the wait then begins now"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAsk:
    """When a start was first asked for.

    Attributes:
        at: Seconds since 1970.
        conditions: Digest of the table ``start``: a changed one begins a new wait.
    """

    at: float
    conditions: str


def since(plan: DeploymentPlan, now: float, tell: Tell) -> float:
    """When a deployment's start was first asked for, by this command or an earlier one.

    Args:
        plan: The deployment.
        now: Seconds since 1970; written down if there is no earlier time.
        tell: Called with a word about an earlier command.

    Raises:
        CorruptObject: The record is damaged.
        StoreUnavailable: It cannot be written.
    """
    table = repr(sorted(asdict(plan.file.start).items()))
    conditions = hashlib.sha256(table.encode()).hexdigest()
    # A command that was killed may have made the folder after it had begun to wait.
    for path in (_inside(plan), _beside(plan)):
        found = durable_json.read(path, FirstAsk, advice=_DAMAGED)
        # A clock that was set back must not make the wait longer.
        if found is not None and found.conditions == conditions and found.at <= now:
            hours = (now - found.at) / 3600.0
            tell(
                f"an earlier command began to wait {hours:.1f} h ago, and "
                "start.at_latest_hours counts from then; crossfed down restarts the "
                "wait"
            )
            return found.at
    # The folder is made when the first machine starts; until then no cloud is asked.
    path, other = _inside(plan), _beside(plan)
    if not plan.folder.exists():
        path, other = other, path
    with file_errors("make", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    durable_json.write(path, FirstAsk(at=now, conditions=conditions))
    with file_errors("remove", other):
        other.unlink(missing_ok=True)
    return now


def forget(plan: DeploymentPlan) -> None:
    """Have the next start begin a new wait.

    Raises:
        StoreUnavailable: The record cannot be removed.
    """
    for path in (_inside(plan), _beside(plan)):
        with file_errors("remove", path):
            path.unlink(missing_ok=True)


def _inside(plan: DeploymentPlan) -> Path:
    return plan.folder / _NAME


def _beside(plan: DeploymentPlan) -> Path:
    return plan.folder.with_name(f".{plan.folder.name}.{_NAME}")
