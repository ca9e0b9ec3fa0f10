"""Which model a run leaves, and early stopping; see ``federation.rounds.selection``."""

from collections.abc import Mapping
from functools import partial

from federation.methods.method import Method, Thing

_NO_RESULTS: Mapping[str, str] = {
    "no model is evaluated, so none can be compared: set evaluation.every to 1 or "
    "more": Thing.NO_RESULTS,
}
_AVERAGE: Mapping[str, str] = {
    "an average of the models of several rounds mixes factors of different products: "
    'set selection.model to "best" or "last"': Thing.EXACT_ADAPTERS,
}
_selection = partial(
    Method,
    key="selection.model",
    always_decides=True,
    private_because="models and results have their noise before they are compared",
)
_comparison = partial(
    _selection,
    excludes=_NO_RESULTS,
    parts=("selection.metric", "selection.goal", "selection.min_change"),
)

BEST_MODEL = _comparison(name="selection of the best model", on=("best",))
EARLY_STOPPING = _comparison(name="early stopping", key="selection.patience")
EMA = _selection(
    name="a moving average of models",
    on=("ema",),
    parts=("selection.decay", "selection.average_from"),
    excludes=_AVERAGE,
)
SWA = _selection(
    name="an equal average of models",
    on=("swa",),
    parts=("selection.average_from",),
    excludes=_AVERAGE,
)
