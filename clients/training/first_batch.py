"""One batch forward and backward at each kind of site, before a run or without one."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from clients.data.datasets import (
    Batch,
    Dataset,
    first_not_finite,
    not_finite_records,
    not_finite_rows,
)
from clients.models.applying import logits_of
from clients.models.evaluation_notes import (
    PROBABILITIES,
    SIGMOID,
    are_probabilities,
    beyond_bounds,
    ends_in_sigmoid,
)
from clients.models.objectives import RecordObjective, classes_misfit, stays_finite
from clients.training.local_federation import Federation
from clients.training.private_steps import takes_private_steps
from clients.training.trainer import TorchTrainer
from clients.training.update import beyond_clip, prepare
from clients.user_code import sentence
from federation.errors import JobError, SiteError
from federation.ids import SiteId
from federation.job.code_files import unpinned
from federation.job.metrics import LOSS, TRAINER, loss_of, metrics_of
from federation.job.privacy_job import PrivacySpec
from federation.job.spec import JobSpec
from federation.protocols import Trainer
from federation.tree import Tree, map_tree
from federation.vectors import Vector, norm
from privacy.counts import coarse

_LOG = logging.getLogger(__name__)

_MOST_RECORDS, _CHUNK = 1024, 256  # To look for NaN and labels in.

_TargetsRead = list[list[Tree]]  # By part of the data, then by batch.


def check_first_batches(federation: Federation) -> tuple[int, int]:
    """Read records of every site, and take a step at each kind of site.

    Sites with the same table of data are of one kind. A run of statistics takes no
    steps: its columns are read.

    Returns:
        Records in which it has looked for NaN, and all records of these sites.

    Raises:
        JobError: The factory does not make the same model in every call.
        SiteError: A site could not train or evaluate; the cause is kept.
    """
    job, seen, num_classes = federation.job, [], 0
    first: SiteId | None = None
    num_read = num_all = 0
    federation.pool.reserve(2)
    for site in job.sites:
        data = job.data if site.data is None else site.data
        if site.flower_app is not None or data is None:
            continue
        name = SiteId(site.name)
        first = name if first is None else first
        try:
            if job.statistics is not None:
                federation.statistics_trainer(name)
                continue
            _check_size(federation, name)
            read = _check_records(federation, name)
            _check_columns(federation, first, name)
            if data not in seen:
                num_classes = _check_step(federation, name)
            _check_labels(federation, name, num_classes, read)
            _check_smallest_batch(federation, name)
        except Exception as error:
            # User code may raise anything. This translates and does not continue.
            source = unpinned(data.source)  # As in the job file, without its digest.
            raise SiteError(
                f"site {name!r}, data {source!r}: {sentence(error)}"
            ) from error
        seen.append(data)
        sizes = list(map(len, federation.site_data[name]))
        num_read += sum(min(size, _MOST_RECORDS) for size in sizes)
        num_all += sum(sizes)
    return num_read, num_all


def _check_size(federation: Federation, name: SiteId) -> None:
    """Check that a site may weigh as much in a secure sum as it has records.

    Raises:
        SiteError: It has more, so it would decline every round.
    """
    job = federation.job
    secure, size = job.privacy.secure_aggregation, len(federation.site_data[name][0])
    if not secure.enabled or job.aggregation.weights == "uniform":
        return
    if secure.max_examples is not None and size > (most := coarse(secure.max_examples)):
        raise SiteError(
            f"it has {size} training records, and privacy.secure_aggregation."
            f"max_examples allows {most}, so it would decline every round: set it to "
            "the largest number at any site, or more"
        )


def _check_records(federation: Federation, name: SiteId) -> _TargetsRead:
    """Read the first records of a site, and return their targets by part."""
    found: _TargetsRead = []
    pool, is_loop = federation.pool, federation.job.training.task == TRAINER

    def is_handled(batch: Batch) -> bool:
        if is_loop:
            return False  # Its loss is not known here.
        batch = map_tree(lambda part: part.to(pool.device), batch)
        with pool.borrow() as model:
            model.load(*pool.initial_weights())
            return stays_finite(
                pool.objective, model.module, batch, gradients=what == "training"
            )

    for part, what in zip(
        federation.site_data[name], ("training", "held-out"), strict=True
    ):
        size, targets = min(len(part), _MOST_RECORDS), []
        for start in range(0, size, _CHUNK):
            indices = np.arange(start, min(start + _CHUNK, size))
            batch = part.batch(indices)
            if len(not_finite_rows(batch)):
                bad = first_not_finite(part, [indices], is_handled)
                if bad is not None:
                    raise SiteError(not_finite_records(what, bad))
            targets.append(batch[1])
        found.append(targets)
    return found


def _check_columns(federation: Federation, first: SiteId, name: SiteId) -> None:
    """Check that a site's records have the columns of the first site's."""
    one = np.zeros(1, np.int64)
    for number, what in enumerate(("inputs", "targets")):
        here, there = (
            _form(federation.site_data[site][0].batch(one)[number])
            for site in (name, first)
        )
        if here != there:
            raise SiteError(
                f"{what} are {here}, and those of site {first!r} are {there}: give "
                "all sites the same columns, under the same names and in one order"
            )


def _form(values: Tree) -> str:
    """The nesting of a batch, without shapes, which padding may change."""
    if isinstance(values, Mapping):
        return "{" + ", ".join(f"{k}: {_form(v)}" for k, v in values.items()) + "}"
    if isinstance(values, (tuple, list)):
        return "(" + ", ".join(map(_form, values)) + ")"
    return "none" if values is None else str(values.dtype).removeprefix("torch.")


def _check_step(federation: Federation, name: SiteId) -> int:
    """Train and evaluate on one batch.

    Returns:
        How many classes the model knows; 0 if the task is another one.

    Raises:
        JobError: The model mixes records that privacy keeps apart, or gives
            probabilities in place of logits.
    """
    job, pool = federation.job, federation.pool
    train, held_out = federation.site_data[name]
    held_out = held_out.subset(np.arange(min(len(held_out), _CHUNK)))
    if job.training.task == TRAINER:
        loop = replace(federation, job=_one_step(job))
        _try(federation, loop.loop_trainer(name, (train, held_out)), held_out)
        return 0
    pool.noted.add(PROBABILITIES)  # An error below, and no warning before it.
    trainer = _trainer(federation, name, train, held_out)
    _try(federation, trainer, held_out)
    _note_bounds(federation, held_out)
    weights_d, integers_m = pool.initial_weights()
    batch = train.batch(np.arange(min(len(train), job.training.batch_size)))
    batch = map_tree(lambda part: part.to(pool.device), batch)
    with pool.borrow() as model:
        model.load(weights_d, integers_m)
        if takes_private_steps(job):
            model.module.train()
            trainer.check_apart(model.module, batch, gradients=True)
        if job.training.task in {"binary", "multi_label"} and ends_in_sigmoid(
            logits_of(model.module.eval(), batch[0])
        ):
            raise JobError(SIGMOID, key="model.factory")
        if job.training.task != "classification":
            return 0
        with torch.no_grad():
            logits_bk = logits_of(model.module.eval(), batch[0])
    if are_probabilities(logits_bk):
        raise JobError(PROBABILITIES, key="model.factory")
    return len(logits_bk[0])


def _one_step(job: JobSpec) -> JobSpec:
    """Take differential privacy off, whose requirements are checked elsewhere.

    And secure aggregation with it: without its noise the sum would have rules that it
    does not have in the job, such as ``filled_parts``. No task says which part of the
    data to take, so all of it is there.
    """
    private = job.privacy.differential_privacy.enabled
    off = PrivacySpec() if private else job.privacy
    step = replace(job.training, local_steps=1, local_epochs=None)
    data = job.data and replace(job.data, placement="static")
    return replace(job, training=step, privacy=off, data=data)


def _trainer(
    federation: Federation, name: SiteId, train: Dataset, held_out: Dataset
) -> TorchTrainer:
    job, pool = _one_step(federation.job), federation.pool
    job = replace(job, training=replace(job.training, accumulate=1))
    return TorchTrainer(job, name, pool=pool, train=train, held_out=held_out)


def _check_smallest_batch(federation: Federation, name: SiteId) -> None:
    """Train or evaluate on one record, where a site has a batch of one.

    Raises:
        SiteError: The model or the objective needs more records.
    """
    job, (train, held_out) = federation.job, federation.site_data[name]
    if job.training.task == TRAINER or takes_private_steps(job):
        return
    first, start = np.zeros(1, np.int64), federation.pool.initial_weights()
    batch_size, size = job.training.batch_size, len(train)
    is_cut = job.training.local_steps is None and size % batch_size == 1
    if is_cut or 1 in {size, batch_size}:
        one = _trainer(federation, name, train.subset(first), held_out)
        one.fit(*start, round_index=1)
    if len(held_out) % job.evaluation.batch_size == 1:
        one = _trainer(federation, name, train, held_out.subset(first))
        one.evaluate(*start, round_index=1)


def _try(federation: Federation, trainer: Trainer, held_out: Dataset) -> None:
    """Train and evaluate once from the first weights.

    Raises:
        SiteError: No held-out record has a label, so no round would be evaluated.
    """
    weights_d, integers_m = federation.pool.initial_weights()
    update_d = prepare(weights_d, trainer.fit(weights_d, integers_m, round_index=1))
    _note_clipped(federation, update_d)
    if not len(held_out):
        return
    if trainer.evaluate(weights_d, integers_m, round_index=1).count == 0:
        raise SiteError(
            f"none of the first {len(held_out)} held-out records has a label that "
            "counts (-100 leaves a place out), so nothing can be evaluated: check how "
            "the data function sets the labels"
        )


def _note_clipped(federation: Federation, update_d: Vector) -> None:
    """Warn if a single step is more than secure aggregation lets through of a round."""
    job, layout = federation.job, federation.pool.layout
    secure, private = job.privacy.secure_aggregation, job.privacy.differential_privacy
    size, bound = norm(update_d), job.update_clip_norm
    if secure.enabled and not private.enabled and size > bound:
        parts = {
            spec.name: norm(view.ravel()) for spec, view in layout.float_views(update_d)
        }
        most = max(parts, key=lambda name: parts[name])
        _LOG.warning("after one step %s", beyond_clip(size, bound, most))


def _note_bounds(federation: Federation, held_out: Dataset) -> None:
    """Warn if values of the first model are beyond the bounds that the job states."""
    pool, training = federation.pool, federation.job.training
    objective, size = pool.objective, min(len(held_out), training.batch_size)
    if not size or not isinstance(objective, RecordObjective) or not training.metrics:
        return
    batch = held_out.batch(np.arange(size))
    inputs, targets = map_tree(lambda part: part.to(pool.device), batch)
    with pool.borrow() as model, torch.no_grad():
        model.load(*pool.initial_weights())
        values = objective.values(model.module.eval(), inputs, targets)
    bounds = {LOSS: loss_of(training), **metrics_of(training)}
    for text in beyond_bounds(values, bounds):
        _LOG.warning("%s", text)


def _check_labels(
    federation: Federation, name: SiteId, num_classes: int, read: _TargetsRead
) -> None:
    """Check the class of every record: a batch need not have them all.

    Of a dataset that has its labels only in its items, check those that were read.
    """
    if num_classes == 0:
        return
    for part, targets in zip(federation.site_data[name], read, strict=True):
        labels = part.labels()
        batches = targets if labels is None else [torch.from_numpy(labels)]
        for found in batches:
            if not isinstance(found, torch.Tensor) or not found.numel():
                continue
            if found.min() < 0 or found.max() >= num_classes:
                raise classes_misfit(num_classes, found)
