"""What the keys of a site's Flower app must not be.

What such an app cannot do is in ``federation.methods.flower_apps``.
"""

from federation.errors import JobError
from federation.job.flower_app_job import FlowerAppSpec
from federation.job.metrics import CORRECT, metrics_of
from federation.job.spec import JobSpec, TrainingSpec

# What the record of settings says by itself.
ROUND = "server-round"

_SETTINGS = (bool, int, float, str)


def check_flower_apps(job: JobSpec) -> None:
    """Refuse values that a Flower app cannot take.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    for index, site in enumerate(job.sites):
        if site.flower_app is None:
            continue
        if site.data is not None:
            raise JobError(
                f"site {site.name!r} runs a Flower app, which brings its own data: "
                "remove this key",
                key=f"sites[{index}].data",
            )
        _check_app(site.flower_app, job, key=f"sites[{index}].flower_app")


def _check_app(app: FlowerAppSpec, job: JobSpec, *, key: str) -> None:
    names = {
        "arrays": app.arrays,
        "config": app.config,
        "metrics": app.metrics,
        "num_examples": app.num_examples,
    }
    if app.evaluate:
        names |= {"eval_loss": app.eval_loss}
        _check_accuracy(app, job.training, key=f"{key}.eval_accuracy")
    for field, name in names.items():
        if not name:
            raise JobError("must not be empty", key=f"{key}.{field}")
    if app.arrays == app.config:
        raise JobError(
            f"{app.arrays!r} cannot be two records of one message", key=f"{key}.config"
        )
    for name, value in app.settings.items():
        if name == ROUND:
            raise JobError(
                "is reserved for the round number: choose another name",
                key=f"{key}.settings.{name}",
            )
        if not isinstance(value, _SETTINGS):
            raise JobError(
                "must be a number, a string, true or false: a Flower record has no "
                "tables",
                key=f"{key}.settings.{name}",
            )


def _check_accuracy(app: FlowerAppSpec, training: TrainingSpec, *, key: str) -> None:
    if not app.eval_accuracy and CORRECT.keys() & metrics_of(training):
        raise JobError(
            f"must not be empty, since the task {training.task} reports accuracy: for "
            'an app without it, set training.task to "regression" or your own '
            "objective, or evaluate = false",
            key=key,
        )
