"""The figures of a run's report, each with a title and a caption."""

import functools
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from federation.job.metrics import ENTROPIES
from monitoring import privacy_words, units
from monitoring.pages import plots, report_privacy
from monitoring.pages.timeline_plot import MAX_ROUNDS_IN_TIMELINE
from monitoring.views.run_view import RunView

_TOGETHER = "measured over all sites together"
_EACH = "over all sites (thick) and on each site's own data (thin)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A figure with its title and caption."""

    name: str
    title: str
    caption: str
    svg: str
    log_svg: str = ""  # the same on a logarithmic axis
    log_label: str = ""
    key: Mapping[str, str] | None = None  # colours of sites or runs that have a line
    dashes: Sequence[int] = ()  # and their dashes
    is_wide: bool = False
    has_pooled: bool = True  # a thick line for all sites
    has_training: bool = False


@functools.cache
def _captions(page: str) -> Mapping[str, Mapping[str, str]]:
    """Title and caption of each figure of a page, ``run`` or ``comparison``."""
    path = Path(__file__).with_name("captions.toml")
    found: Mapping[str, Mapping[str, str]] = tomllib.loads(path.read_text("utf-8"))[
        page
    ]
    return found


def of_run(view: RunView, names: Collection[str] = ()) -> Sequence[Panel]:
    """Figures that the run has data for, in reading order.

    Args:
        view: The run.
        names: Draw only these; by default all.
    """
    keys = _keys(view)
    return tuple(
        replace(
            panel,
            key=keys.get(panel.name),
            has_pooled=panel.name != "epsilon",
            is_wide=panel.name == "timeline",
            has_training=panel.name == "loss"
            and bool(dict(view.totals.curves)["training"]),
        )
        for panel in from_drawn("run", plots.draw_all(view, names), _words(view))
    )


def from_drawn(
    page: str, drawn: Mapping[str, str], words: Mapping[str, str]
) -> Sequence[Panel]:
    """The figures of a page that were drawn, in reading order, with their words."""
    return tuple(
        Panel(
            name=name,
            title=said["title"],
            caption=said["caption"].format(**words),
            svg=drawn[name],
            log_svg=drawn.get(f"{name}-log", ""),
            log_label=said.get("log", ""),
        )
        for name, said in _captions(page).items()
        if name in drawn
    )


def _words(view: RunView) -> Mapping[str, str]:
    """The texts of captions for this run."""
    kind = view.data.label_kind if view.data else ""
    # How much noise an objective of a user's has is in no event.
    shades = privacy_words.has_noise(view.privacy) and view.started.task in ENTROPIES
    shades = shades and view.past is None
    num_timed = min(len(view.rounds), MAX_ROUNDS_IN_TIMELINE)
    return {
        "whose": _TOGETHER if view.is_secret else _EACH,
        "alone": f", {_TOGETHER}" if view.is_secret else "",
        "training": " Dashed: loss during training, over all sites."
        if plots.training_losses(view)
        else "",
        "shade": " Shaded: two standard deviations of the noise." if shades else "",
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
