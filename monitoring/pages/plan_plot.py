"""Time and cost of the ways to run a job, as a picture of its own."""

import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from federation.errors import JobError, StoreUnavailable
from federation.os_errors import os_errors
from monitoring.pages.figures import FAINT, INK, SITE_COLOURS

_FORMATS = (".svg", ".png")


def write(points: Mapping[str, tuple[float, float]], path: Path) -> None:
    """Draw a point for each way.

    Args:
        points: Seconds and dollars by name.
        path: Where to write; its ending names the format.

    Raises:
        JobError: The ending is neither ``.svg`` nor ``.png``.
        StoreUnavailable: The file cannot be written.
    """
    if path.suffix not in _FORMATS:
        raise JobError(f"{path.name} must end in .svg or .png", key="--plot")
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, (seconds, dollars)) in enumerate(points.items()):
        colour = SITE_COLOURS[index % len(SITE_COLOURS)]
        marker = "o" if index < len(SITE_COLOURS) else "s"
        axes.plot(seconds, dollars, marker, color=colour, label=name)
    axes.set_xlabel("seconds", color=INK)
    axes.set_ylabel("dollars", color=INK)
    most = [max(values) for values in zip(*points.values(), strict=True)]
    axes.set_xlim(0.0, 1.08 * most[0] or 1.0)
    axes.set_ylim(0.0, 1.08 * most[1] or 1.0)
    axes.tick_params(colors=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5)
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    # Not by the library: its frames would be shown below the error as the user's.
    with os_errors(StoreUnavailable, f"write {path}", "name another file"):
        path.write_bytes(drawn.getbuffer())
