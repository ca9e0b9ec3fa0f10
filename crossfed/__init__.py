"""Train one model across clouds without moving data.

>>> import crossfed
>>> job = crossfed.load_job(
...     {
...         "name": "tiny",
...         "rounds": 3,
...         "model": {
...             "factory": "clients.models:logistic_regression",
...             "options": {"inputs": 30, "classes": 2},
...         },
...         "data": {"source": "clients.data:breast_cancer"},
...         "training": {"local_steps": 5},
...         "sites": [{"name": "a"}, {"name": "b"}],
...     },
...     {"training.optimizer.lr": 0.1},
... )
>>> result = crossfed.simulate(job, rounds=2)
>>> result.status
'completed'
>>> [row["round"] for row in result.history]
[1, 2]

Importing this package is cheap: what a name needs is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crossfed import _rooms

_rooms.come_first()

if TYPE_CHECKING:
    from crossfed.patching import patch
    from crossfed.running import compare, load_job, report, simulate
    from federation.job.spec import JobSpec as Job
    from monitoring.runs.run_result import RunResult

    __version__: str

__all__ = [
    "Job",
    "RunResult",
    "__version__",
    "compare",
    "load_job",
    "patch",
    "report",
    "simulate",
]

_PLACES = {
    "Job": ("federation.job.spec", "JobSpec"),
    "RunResult": ("monitoring.runs.run_result", "RunResult"),
    "patch": ("crossfed.patching", "patch"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("crossfed")
    elif name in __all__:
        module, attribute = _PLACES.get(name, ("crossfed.running", name))
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'crossfed' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
