"""The report's texts on differential privacy, besides its figures."""

from collections.abc import Mapping

from monitoring import privacy_words
from monitoring.views.run_view import RunView


def context(view: RunView) -> Mapping[str, str | bool]:
    """The page's texts on differential privacy; empty without it."""
    planned = view.privacy
    loss_noise = privacy_words.loss_noise(planned, view.last_evaluated)
    noise = privacy_words.accuracy_noise(planned, view.last_evaluated)
    return {
        "signal": (privacy_words.signal(planned) or "") if planned else "",
        "is_in_sum": privacy_words.is_in_sum(planned),
        "is_of_sites": privacy_words.is_of_sites(planned),
        "unit": privacy_words.unit(planned) if planned else "",
        "noisy": privacy_words.NOISY if privacy_words.has_noise(planned) else "",
        "terms": privacy_words.terms(planned) if planned else "",
        "meaning": privacy_words.meaning(
            planned, view.total_spent, by_results=view.by_results
        )
        if planned
        else "",
        "loss_noise": "" if loss_noise is None else f"{loss_noise:.2g}",
        "accuracy_noise": ""
        if noise is None or view.is_language
        else privacy_words.format_points(noise),
    }


def terms(view: RunView) -> str:
    """The terms of the run's epsilon; empty without one."""
    return privacy_words.terms(view.privacy) if view.privacy else ""


def adaptive_clip(view: RunView) -> str:
    """The text on an adaptive clip norm."""
    if not view.clip_adapts:
        return ""
    return (
        " The clip norm limits each site's update; it adapts to the share of updates "
        "below it."
    )


def spender(view: RunView) -> str:
    """Whose spending is meant: the beginning of a sentence."""
    if privacy_words.is_of_sites(view.privacy):
        return "Spent by every site"
    return "Spent by each site on its training records"
