"""The figures of a run's report, each with a title and a caption."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monitoring import privacy_words, units
from monitoring.pages import plots, report_privacy
from monitoring.pages.timeline_plot import MAX_ROUNDS_IN_TIMELINE
from monitoring.views.run_view import RunView

_TOGETHER = "known of all sites together only"
_EACH = "all sites together (thick), each site's own data (thin)"

# Name, title and caption of every figure, in reading order.
_FIGURES = (
    (
        "loss",
        "Loss",
        (
            "Held-out loss of the global model after each round: {whose}. Lower "
            "is better.{shade}"
        ),
    ),
    (
        "accuracy",
        "Accuracy",
        (
            "Share of right predictions on the same held-out data{alone}. Higher "
            "is better.{shade}"
        ),
    ),
    (
        "perplexity",
        "Perplexity",
        (
            "Exponential of the loss on the same held-out data{alone}: among how many "
            "tokens the model hesitates. Lower is better."
        ),
    ),
    (
        "epsilon",
        "Epsilon",
        (
            "{spender} by the end of each round, and its cap ({terms}). Lower is more "
            "private."
        ),
    ),
    ("data", "Who holds what", "Training examples{by}."),
    (
        "bytes",
        "Traffic by site",
        "Bytes that crossed between the aggregator and each site.",
    ),
    (
        "answers",
        "Who answered",
        "Sites of each round whose update counted, and tasks that failed.",
    ),
    (
        "update-norm",
        "Size of the steps",
        (
            "Norm of the combined update. It shrinks as training settles; a jump is "
            "worth a look.{adaptive_clip}"
        ),
    ),
    (
        "timeline",
        "Where the time went",
        (
            "The last {timed}. Pale stretches are waiting; a site's work is placed "
            "from the moment it was asked."
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A figure with its title and what it shows."""

    name: str
    title: str
    caption: str
    svg: str
    key: Mapping[str, str] | None = None  # sites that it has a line of, and colours
    is_wide: bool = False
    has_pooled: bool = True  # a thick line for all sites


def of_run(view: RunView) -> Sequence[Panel]:
    """Every figure that there is, in reading order."""
    drawn, words, keys = plots.draw_all(view), _words(view), _keys(view)
    return tuple(
        Panel(
            name=name,
            title=title,
            caption=caption.format(**words),
            svg=drawn[name],
            key=keys.get(name),
            has_pooled=name != "epsilon",
            is_wide=name == "timeline",
        )
        for name, title, caption in _FIGURES
        if name in drawn
    )


def _words(view: RunView) -> Mapping[str, str]:
    """What captions say of this run."""
    kind = view.data.label_kind if view.data else ""
    has_noise = privacy_words.has_noise(view.privacy)
    num_timed = min(len(view.rounds), MAX_ROUNDS_IN_TIMELINE)
    return {
        "whose": _TOGETHER if view.is_secret else _EACH,
        "alone": f", {_TOGETHER}" if view.is_secret else "",
        "shade": " Shaded: two standard deviations of the noise." if has_noise else "",
        "spender": report_privacy.spender(view),
        "terms": report_privacy.terms(view),
        "by": f" by site and {kind}" if kind else "",
        "adaptive_clip": report_privacy.adaptive_clip(view),
        "timed": units.format_count(num_timed, "round"),
    }


def _keys(view: RunView) -> Mapping[str, Mapping[str, str]]:
    """Colours of the sites that have a line, by figure."""
    colours = plots.site_colours(view)
    known = {site.site for site in view.sites if site.loss}
    of_metrics = {site: colour for site, colour in colours.items() if site in known}
    keys: dict[str, Mapping[str, str]] = dict.fromkeys(
        ("loss", "accuracy", "perplexity"), of_metrics
    )
    if not privacy_words.is_of_sites(view.privacy):
        keys["epsilon"] = colours
    return keys
