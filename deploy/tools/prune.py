"""Write a run's model with small weights set to zero, to train on from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aggregator import model_export
from clients.models import weights
from clients.models.pruning import Sparsity, prune_
from clients.models.trained import trained_model
from deploy.tools.hugging_face_folder import has_adapters
from federation.durable_files import replace_file
from federation.errors import JobError, ObjectExists, RunNotFound
from federation.protocols import RunState
from monitoring.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedModel:
    """What was written.

    Attributes:
        run_id: The run whose model it was.
        path: The file, for ``model.weights``.
        layers: How many weights of each layer are zero.
    """

    run_id: str
    path: str
    layers: Sequence[Sparsity]


def prune(run: RunFolder, fraction: float, *, kind: str, out: Path) -> PrunedModel:
    """Prune a run's model; see ``clients.models.pruning.prune_``.

    Args:
        run: A run that has left a model.
        fraction: Share of the weights, or of each layer's outputs.
        kind: ``value`` or ``channel``.
        out: A new safetensors file.

    Raises:
        RunNotFound: The run has no model yet.
        ObjectExists: The file is there.
        JobError: Nothing can be pruned.
    """
    if out.exists():
        raise ObjectExists(f"{out} exists: choose another file, or remove it")
    if not run.model.is_file():
        raise RunNotFound(
            f"the run in {run.path} has no model yet: resume it until it completes"
        )
    pool, model = trained_model(run.read_spec(), run.model)
    if has_adapters(model):
        raise JobError(
            "the run trained adapters, which are small already: prune the model that "
            "they were trained on",
            key="RUN",
        )
    layers = prune_(model, fraction, kind=kind)
    weights_d, integers_m = weights.read(model, pool.layout)
    state = RunState(
        round_index=0,
        rounds_completed=0,
        lost_in_a_row=0,
        weights_d=weights_d,
        integers_m=integers_m,
        optimizer={},
    )
    frozen = weights.frozen_arrays(model, pool.layout)
    arrays = model_export.named_arrays(pool.layout, state, frozen)
    replace_file(out, model_export.file_pieces(pool.layout, arrays))
    return PrunedModel(
        run_id=run.run_id() or run.path.name, path=str(out), layers=layers
    )
