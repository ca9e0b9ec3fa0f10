"""What a job must not request if sites run Flower apps.

Such an app was not written for this product: it gets the model and gives one back.
Anything else that a site must do does not happen there.
"""

from federation.errors import JobError
from federation.job.flower_app_job import FlowerAppSpec
from federation.job.metrics import (
    BUILT_IN,
    CORRECT,
    WEIGHTING,
    is_function,
    metrics_of,
)
from federation.job.spec import JobSpec, TrainingSpec

# What the record of settings says by itself.
ROUND = "server-round"

_SETTINGS = (bool, int, float, str)


def check_flower_apps(job: JobSpec) -> None:
    """Refuse what a Flower app cannot do.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    apps = [
        (index, site.name, site.flower_app)
        for index, site in enumerate(job.sites)
        if site.flower_app is not None
    ]
    for index, name, app in apps:
        _check_site(job, index, name)
        _check_app(app, job, key=f"sites[{index}].flower_app")
    if apps:
        _check_job(job, apps[0][1])


def _check_site(job: JobSpec, index: int, name: str) -> None:
    if job.sites[index].data is not None:
        raise JobError(
            f"site {name!r} runs a Flower app, which brings its own data: remove this "
            "key",
            key=f"sites[{index}].data",
        )


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


def _check_job(job: JobSpec, name: str) -> None:
    private = job.privacy
    for refused, reason, key in (
        (
            private.secure_aggregation.enabled,
            "it cannot mask its update, and the sum of the others would exclude it",
            "privacy.secure_aggregation.enabled",
        ),
        (
            private.differential_privacy.enabled,
            "nothing there clips its gradients, adds noise or keeps a ledger",
            "privacy.differential_privacy.unit",
        ),
        (
            job.communication.links.changes,
            "it does not keep a model between rounds",
            "communication.down_content",
        ),
        *(
            (
                spec.name != "identity",
                "it sends and receives whole arrays of float32",
                f"communication.{way}.name",
            )
            for way, spec in (
                ("codec", job.communication.codec),
                ("down_codec", job.communication.down_codec),
            )
        ),
        (
            job.aggregation.weights == "dynamic",
            "it does not evaluate its trained model; use examples or uniform",
            "aggregation.weights",
        ),
        (
            not is_function(job.training.task)
            and BUILT_IN.get(job.training.task) not in (CORRECT, {}),
            "it reports loss and accuracy, not the counts of this task",
            "training.task",
        ),
        (
            not job.training.options.keys().isdisjoint(WEIGHTING),
            "it computes its own loss: leave out class_weights and label_smoothing",
            "training.options",
        ),
        (
            bool(job.training.measures),
            "it reports loss and accuracy, and no further measures; leave them out",
            "training.measures",
        ),
        (
            bool(job.training.classes),
            "it reports loss and accuracy, and no confusion matrix; leave them out",
            "training.classes",
        ),
        (
            job.training.proximal_mu != 0.0,
            "nothing there keeps it near the global weights; or use settings",
            "training.proximal_mu",
        ),
        (
            bool(job.model.personal),
            "it sends its whole model, and nothing there keeps a part; leave them out",
            "model.personal",
        ),
        (
            bool(job.model.frozen),
            "it may train whatever it is given; freeze parameters in the factory",
            "model.frozen",
        ),
        (
            bool(job.model.tokenizers),
            "nothing there says which tokeniser its data have; leave them out",
            "model.tokenizers",
        ),
        (
            job.training.overlap_steps != 0,
            "nothing there works ahead; remove this key",
            "training.overlap_steps",
        ),
        (
            job.training.normalized_steps is not None,
            "it does not report its steps, and nothing scales its update",
            "training.normalized_steps",
        ),
        (
            job.training.optimizer.state != "fresh",
            "nothing there keeps its optimiser state; if the app does, remove this key",
            "training.optimizer.state",
        ),
    ):
        if refused:
            raise JobError(f"site {name!r} runs a Flower app: {reason}", key=key)
