"""The page of an audit: one HTML file that opens anywhere, like a report."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from federation.epsilon_text import format_epsilon
from monitoring.audit_findings import FALSE_POSITIVES, AuditFindings, SiteFindings
from monitoring.pages.figures import (
    FAINT,
    INK,
    SITE_COLOURS,
    draw,
    label_axes,
    log_scale,
    new_figure,
)
from monitoring.pages.panels import Panel
from monitoring.pages.report import environment, write_page
from monitoring.units import format_delta
from privacy.dp.auditing import Roc, Scores, largest_true_positives

CANARIES_COLOUR, FINAL_COLOUR, LOCAL_COLOUR = SITE_COLOURS[0], *SITE_COLOURS[2:4]
OUT_COLOUR, BOUND_COLOUR, GUESSING_COLOUR = SITE_COLOURS[4], "#c2372e", FAINT

MAX_SITES_DRAWN = 8
_BINS = 80
_ROOM = 0.25  # Beside the heaps, of their width.
_LEAST_RATE = 1e-4  # Where the logarithmic axes begin, unless records are few.


def _roc_key(site: SiteFindings) -> Mapping[str, str]:
    found = {
        "canaries": CANARIES_COLOUR,
        "training records, final model": FINAL_COLOUR,
    }
    if site.membership.local is not None:
        found["training records, site's own model"] = LOCAL_COLOUR
    found["guessing"] = GUESSING_COLOUR
    if site.promise.is_private:
        found["most that epsilon allows"] = BOUND_COLOUR
    return found


def _scores(site: SiteFindings) -> Figure:
    """Draw the canaries' scores, and where the attacker's guesses begin."""
    figure, axes = new_figure()
    places = np.histogram_bin_edges(site.scores_m, bins=_BINS)
    inside, out = site.scores_m[site.is_in_m], site.scores_m[~site.is_in_m]
    for scores, colour in ((out, OUT_COLOUR), (inside, CANARIES_COLOUR)):
        axes.hist(
            scores,
            bins=places.tolist(),
            histtype="stepfilled",
            color=colour,
            alpha=0.55,
        )
    cuts = (
        (site.guesses.low, '"out" up to here', "right", -4),
        (site.guesses.high, '"in" from here', "left", 4),
    )
    _, top = axes.get_ylim()
    axes.set_ylim(0, 1.15 * top)
    room = _ROOM * float(places[-1] - places[0])  # For the labels beside the cuts.
    axes.set_xlim(places[0] - room, places[-1] + room)
    for cut, text, side, offset in cuts:
        axes.axvline(cut, color=INK, lw=1.2, ls=(0, (4, 3)))
        axes.annotate(
            text,
            (cut, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(offset, -10),
            textcoords="offset points",
            ha=side,
            color=INK,
        )
    label_axes(
        axes, "score: what is seen along a canary's coordinate, summed", "canaries"
    )
    return figure


def _roc(site: SiteFindings) -> Figure:
    """Draw true against false positives, and what epsilon allows."""
    figure, axes = new_figure()
    curves = [
        (site.membership.final, FINAL_COLOUR, 1.4),
        (site.canaries, CANARIES_COLOUR, 2.2),
    ]
    if site.membership.local is not None:
        curves.insert(0, (site.membership.local, LOCAL_COLOUR, 1.4))
    least = min(_LEAST_RATE, *(0.5 / roc.num_out for roc, _, _ in curves))
    rates = np.geomspace(least, 1, 400)
    axes.plot(rates, rates, color=GUESSING_COLOUR, lw=1, ls=(0, (2, 3)))
    if site.promise.is_private:
        allowed = largest_true_positives(
            rates, epsilon=site.promise.epsilon, delta=site.promise.delta
        )
        axes.plot(rates, allowed, color=BOUND_COLOUR, lw=1.6, ls=(0, (5, 3)))
    for roc, colour, width in curves:
        axes.plot(*_steps(roc, least), color=colour, lw=width)
    axes.set(xlim=(least, 1), ylim=(0.7 * least, 1.3))
    log_scale(axes.xaxis, subs=(1,))
    log_scale(axes.yaxis, subs=(1,))
    label_axes(axes, "false positive rate", "true positive rate")
    return figure


def _steps(roc: Roc, least: float) -> tuple[Scores, Scores]:
    """The curve from the left edge on, without what logarithms cannot show."""
    across, up = roc.false_positives, roc.true_positives
    first = int(np.searchsorted(across, least))
    # What is reached without a false positive is reached at the left edge too.
    at_edge = up[first - 1] if first else 0.0
    across, up = np.append(least, across[first:]), np.append(at_edge, up[first:])
    shown = up >= least
    return across[shown], up[shown]


def write_audit(findings: AuditFindings, path: Path) -> None:
    """Write the page of an audit atomically.

    Args:
        findings: What was found.
        path: Where to write; a file that is there is replaced.

    Raises:
        StoreUnavailable: The file cannot be written.
    """
    write_page(render(findings), path)


def render(findings: AuditFindings) -> str:
    """Return the page as text."""
    private = (site.promise for site in findings.sites if site.promise.is_private)
    rows = [
        _row(number, site, is_summed=findings.noise_shares is not None)
        for number, site in enumerate(findings.sites)
    ]
    page = environment().get_template("audit.html.j2")
    return page.render(
        findings=findings,
        rows=rows,
        terms=sorted({promise.terms for promise in private}),
        rates=[f"{rate:.1%}" for rate in FALSE_POSITIVES],
        max_sites_drawn=MAX_SITES_DRAWN,
    )


def _row(number: int, site: SiteFindings, *, is_summed: bool) -> Mapping[str, object]:
    """A site's row, as texts."""
    promise, attacks = site.promise, [_rates("final model", site.membership.final)]
    if site.membership.local is not None:
        attacks.append(_rates("site's own last model", site.membership.local))
    is_drawn = number < MAX_SITES_DRAWN
    return {
        "findings": site,
        "epsilon": format_epsilon(promise.epsilon) if promise.is_private else "none",
        "delta": format_delta(promise.delta),
        "attacks": attacks,
        "panels": [*_panels(number, site, is_summed=is_summed)] if is_drawn else (),
    }


def _rates(model: str, roc: Roc) -> Mapping[str, object]:
    """Membership inference in the cells of a table."""
    return {
        "model": model,
        "members": roc.num_in,
        "others": roc.num_out,
        "auc": f"{roc.auc:.3f} \u00b1 {roc.auc_error:.3f}",
        "found": [
            "{:.1%} ({:.1%} to {:.1%})".format(*roc.true_positives_at(rate))
            for rate in FALSE_POSITIVES
        ],
    }


def _panels(number: int, site: SiteFindings, *, is_summed: bool) -> Iterator[Panel]:
    what = "the opened sums" if is_summed else "the site's updates"
    moved = (
        f"How far {what} moved each canary's coordinate. The further apart the two "
        "groups, the more is revealed about one record."
    )
    limit = (
        "Points well above the dashed red line break the guarantee."
        if site.promise.is_private
        else "No guarantee limits these curves."
    )
    rates = "True positive rate against false positive rate, both logarithmic."
    canaries = {"in the data": CANARIES_COLOUR, "not in the data": OUT_COLOUR}
    drawn = draw(
        {
            f"scores-{number}": partial(_scores, site),
            f"roc-{number}": partial(_roc, site),
        }
    )
    words = (
        ("Canaries", moved, canaries),
        ("Attacks", f"{rates} {limit}", _roc_key(site)),
    )
    for (name, svg), (title, caption, key) in zip(drawn.items(), words, strict=True):
        yield Panel(
            name=name, title=title, caption=caption, svg=svg, key=key, has_pooled=False
        )
