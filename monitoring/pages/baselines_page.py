"""The page of a job's baselines: one HTML file that opens anywhere, like a report."""

from pathlib import Path

from monitoring.pages.report import environment, write_page
from monitoring.views.baselines import Baselines


def write_baselines(found: Baselines, path: Path) -> None:
    """Write the page atomically.

    Raises:
        StoreUnavailable: The file cannot be written.
    """
    template = environment().get_template("baselines.html.j2")
    tables = {metric: found.table(metric) for metric in found.metrics}
    write_page(template.render(found=found, tables=tables), path)
