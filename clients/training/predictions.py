"""What a run's model predicts for records of a data set, batch by batch.

One forward pass gives the predictions and, where the records have labels, what the
task's metrics are computed from.

Shape suffixes: B batch, K classes, L labels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.data.datasets import Batch, Dataset, Indices
from clients.data.reading import BatchReader
from clients.methods.half_precision import autocast
from clients.models.applying import apply_model
from clients.models.trained import trained_model
from clients.ranks.peers import NO_PEERS, Sums
from federation.errors import FederationError, SiteError, UserCodeError
from federation.job.metrics import BUILT_IN, LANGUAGE, computed_of
from federation.job.spec import JobSpec, TrainingSpec
from federation.messages import MetricSums
from federation.tree import Tree, leaves, map_tree

Columns = Mapping[str, NDArray[Any]]

# Tasks whose predictions are classes: of NaN scores, the first would be the largest.
_OF_CLASSES = LANGUAGE | {"classification", "binary", "multi_label", "segmentation"}
# Tasks whose inputs say everything.
_WITHOUT_LABELS = frozenset({"causal_lm", "contrastive", "ranking"})


class Predictor:
    """Applies a run's model to data.

    Attributes:
        has_labels: Whether metrics are known, once data was walked through.
    """

    def __init__(self, job: JobSpec, file: Path) -> None:
        """Load the model; see ``trained_model``."""
        self._training = job.training
        self._size = job.evaluation.batch_size
        self._pool, self._model = trained_model(job, file)
        self._sums = Sums(self._pool.device, NO_PEERS, computed_of(job.training))
        self.has_labels = False

    def batches(self, data: Dataset, part: str) -> Iterator[Columns]:
        """Yield columns of predictions, a row for each record, in the data's order.

        Args:
            data: The records.
            part: Which part of its source they are, for messages.

        Raises:
            SiteError: Model and records do not fit, or the scores of a record are NaN
                and the task predicts classes.
        """
        starts = range(0, len(data), self._size)
        walk = (np.arange(i, min(i + self._size, len(data))) for i in starts)
        with BatchReader(data, walk, seed=0) as reader:
            for rows in reader:
                yield self._predicted(reader.batch(rows), rows, part)

    def _predicted(self, batch: Batch, rows: Indices, part: str) -> Columns:
        """Columns of the predictions of one batch."""
        inputs, targets = map_tree(lambda part: part.to(self._pool.device), batch)
        try:
            outputs = self._outputs(inputs, targets)
        except FederationError:
            raise
        except Exception as error:
            # A model may raise anything. This translates and does not continue.
            raise model_misfit(error) from error
        found = columns_of(self._training, outputs)
        for name, values in found.items():
            if values.shape[:1] != rows.shape:
                raise SiteError(
                    f"the model returned {name!r} of shape {list(values.shape)} "
                    f"for a batch of {len(rows)} records: it must return a row for "
                    "each"
                )
        if self._training.task in _OF_CLASSES:
            check_scores(outputs, inputs, int(rows[0]), part)
        return found

    def metrics(self) -> MetricSums | None:
        """The task's sums over the records so far; None if they have no labels."""
        return self._sums.metrics() if self.has_labels else None

    @torch.no_grad()
    def _outputs(self, inputs: Tree, targets: Tree) -> Tree:
        """Apply the model once; all that it returned, if it was called twice."""
        with self._autocast():
            if targets is None and not self._needs_no_labels():
                return apply_model(self._model, inputs)
            seen: list[Tree] = []
            hook = self._model.register_forward_hook(
                lambda _model, _inputs, output: seen.append(output)
            )
            try:
                loss = self._pool.objective(self._model, inputs, targets)
            except UserCodeError:
                # An own objective compares with labels once the model was applied.
                if targets is not None or not seen:
                    raise
                return seen[0] if len(seen) == 1 else tuple(seen)
            finally:
                hook.remove()
        self._sums.add(loss.loss, loss.count, loss.metrics)
        self.has_labels = True
        return seen[0] if len(seen) == 1 else tuple(seen)

    def _needs_no_labels(self) -> bool:
        task = self._training.task
        return task in _WITHOUT_LABELS or task not in BUILT_IN

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self._training.precision, self._pool.device)


def model_misfit(error: Exception) -> SiteError:
    """Say that a run's model does not take these records, and what it raised."""
    said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return SiteError(
        f"the model cannot be applied to these records ({'; '.join(said)}): they must "
        "be like those that it was trained on"
    )


def check_scores(outputs: Tree, inputs: Tree, start: int, part: str) -> None:
    """Check that every record has scores to choose a class by.

    Args:
        outputs: Outputs of a batch, with a row for each record.
        inputs: Inputs of the batch.
        start: Number of its first record in the part.
        part: Which part of the data source it is from.

    Raises:
        SiteError: The scores of a record are NaN.
    """
    scores = _scores(outputs)
    if not isinstance(scores, torch.Tensor):
        return  # They are written as they are.
    bad_b = scores.isnan().reshape(len(scores), -1).any(1)
    if not bad_b.any():
        return
    row = int(bad_b.int().argmax())
    named = f"record {start + row} of {part}"
    if all(part[row].isfinite().all() for part in leaves(inputs)):
        raise SiteError(
            f"the model returns NaN for {named}, whose values are all finite: the "
            "model has diverged, or cannot bear values as large; predict with the "
            "model of another run"
        )
    raise SiteError(
        f"{named} holds NaN or infinite values, so the model returns NaN and no "
        "class: drop or fill these records in the data source"
    )


def columns_of(training: TrainingSpec, outputs: Tree) -> Columns:
    """Turn what a model returned into columns that people read.

    ``classification``: ``prediction`` (a class, or its name) and ``probabilities``;
    ``binary`` and ``multi_label``: ``prediction`` and ``probability`` of 1;
    ``regression``: ``prediction``; ``segmentation`` and language tasks: ``prediction``,
    the class of each pixel or the token of each place. All others: the outputs, as
    ``output`` or, if there are several, ``output_0`` and so on.

    Args:
        training: The job's table.
        outputs: Outputs of a batch.

    Raises:
        SiteError: There is no tensor among them.
    """
    outputs = _scores(outputs)
    if not isinstance(outputs, torch.Tensor):
        return _raw(outputs)
    scores, task = outputs.float(), training.task
    if task == "classification":
        return _classes(scores, training.classes)
    if task in {"binary", "multi_label"}:
        scores = scores.reshape(len(scores)) if task == "binary" else scores
        return {
            "prediction": _array((scores > 0).long()),
            "probability": _array(scores.sigmoid()),
        }
    if task == "segmentation" or task in LANGUAGE:
        axis = 1 if task == "segmentation" else -1
        return {"prediction": _array(scores.argmax(axis))}
    return {"prediction" if task == "regression" else "output": _array(scores)}


def _scores(outputs: Tree) -> Tree:
    """The logits among what a model returned, as models of transformers name them."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return outputs


def _classes(scores_bk: torch.Tensor, classes: Sequence[str]) -> Columns:
    chosen_b = _array(scores_bk.argmax(1))
    names = np.array(classes)
    return {
        "prediction": names[chosen_b] if classes else chosen_b,
        "probabilities": _array(scores_bk.softmax(1)),
    }


def _raw(outputs: Tree) -> Columns:
    if isinstance(outputs, Mapping):
        pairs = [(str(name), part) for name, part in outputs.items()]
    elif isinstance(outputs, tuple | list):
        pairs = [(f"output_{index}", part) for index, part in enumerate(outputs)]
    else:
        pairs = []
    found = {n: _array(part) for n, part in pairs if isinstance(part, torch.Tensor)}
    if not found:
        raise SiteError(
            f"the model returned a {type(outputs).__name__} and not a tensor, so there "
            "is nothing to write: make it return tensors"
        )
    return found


def _array(values: torch.Tensor) -> NDArray[Any]:
    if values.is_floating_point():  # NumPy has no bfloat16.
        values = values.float()
    return values.cpu().numpy()
