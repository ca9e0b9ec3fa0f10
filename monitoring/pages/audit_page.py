"""The page of an audit: one HTML file that opens anywhere, like a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monitoring.audit_findings import FALSE_POSITIVES, AuditFindings, SiteFindings
from monitoring.pages import audit_plots
from monitoring.pages.panels import Panel
from monitoring.pages.report import environment, write_page
from monitoring.units import format_delta, format_epsilon
from privacy.dp.auditing import Roc

MAX_SITES_DRAWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Membership inference in the cells of a table."""

    model: str
    members: int
    others: int
    auc: str
    found: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AuditRow:
    """A site's row, as texts."""

    findings: SiteFindings
    epsilon: str
    delta: str
    attacks: Sequence[_Rates]
    panels: Sequence[Panel]


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
    return (
        environment()
        .get_template("audit.html.j2")
        .render(
            findings=findings,
            rows=[
                _row(number, site, is_summed=findings.noise_shares is not None)
                for number, site in enumerate(findings.sites)
            ],
            terms=sorted(
                {s.promise.terms for s in findings.sites if s.promise.is_private}
            ),
            rates=[f"{rate:.1%}" for rate in FALSE_POSITIVES],
            max_sites_drawn=MAX_SITES_DRAWN,
        )
    )


def _row(number: int, site: SiteFindings, *, is_summed: bool) -> _AuditRow:
    attacks = [_rates("final model", site.membership.final)]
    if site.membership.local is not None:
        attacks.append(_rates("site's own last model", site.membership.local))
    return _AuditRow(
        findings=site,
        epsilon=(
            format_epsilon(site.promise.epsilon) if site.promise.is_private else "none"
        ),
        delta=format_delta(site.promise.delta),
        attacks=attacks,
        panels=(
            _panels(number, site, is_summed=is_summed)
            if number < MAX_SITES_DRAWN
            else ()
        ),
    )


def _rates(model: str, roc: Roc) -> _Rates:
    found = []
    for rate in FALSE_POSITIVES:
        value, low, high = roc.true_positives_at(rate)
        found.append(f"{value:.1%} ({low:.1%} to {high:.1%})")
    return _Rates(
        model=model,
        members=roc.num_in,
        others=roc.num_out,
        auc=f"{roc.auc:.3f} \u00b1 {roc.auc_error:.3f}",
        found=found,
    )


def _panels(number: int, site: SiteFindings, *, is_summed: bool) -> Sequence[Panel]:
    what = "the opened sums" if is_summed else "the site's updates"
    scores, curves = audit_plots.draw_site(str(number), site).items()
    return (
        Panel(
            name=scores[0],
            title="Canaries",
            caption=(
                f"How far {what} moved each canary's coordinate. The further apart the "
                "two groups, the more is revealed about one record."
            ),
            svg=scores[1],
            key=audit_plots.scores_key(),
            has_pooled=False,
        ),
        Panel(
            name=curves[0],
            title="Attacks",
            caption=(
                "True positive rate against false positive rate, both logarithmic. "
                "Points well above the dashed red line break the guarantee."
                if site.promise.is_private
                else (
                    "True positive rate against false positive rate, both logarithmic. "
                    "No guarantee limits these curves."
                )
            ),
            svg=curves[1],
            key=audit_plots.roc_key(site),
            has_pooled=False,
        ),
    )
