"""The sites' data as a table for a terminal."""

from rich.table import Table
from rich.text import Text

from federation.events import DataDistributed, SiteShare
from monitoring.terminal.progress import printable

# Above so many classes or groups a site's largest are named instead of all.
MAX_COLUMNS = 12
NUM_LARGEST = 3
_GAP = 1  # between columns


def data_table(event: DataDistributed, *, columns: int = 80) -> Table:
    """Draw the training and held-out examples of every site.

    Args:
        event: Who holds what; names may be of any origin.
        columns: Width of the terminal: every label has a column if they fit.
    """
    rows = [_site_cells(share) for share in event.shares]
    labels = [printable(label) for label in event.labels]
    counts = [[f"{count:,}" for count in share.counts] for share in event.shares]
    by_label = 0 < len(labels) <= MAX_COLUMNS and columns >= _width(
        [_HEADS, *rows], [labels, *counts]
    )
    title = f"Training examples by {event.label_kind}" if by_label else ""
    table = Table(
        title=Text(title or "Who holds what"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
        header_style="dim",
    )
    for head in _HEADS:
        is_count = head in _HEADS[2:]
        table.add_column(head, justify="right" if is_count else "left", no_wrap=True)
    if by_label:
        for label in labels:
            table.add_column(Text(label), justify="right", no_wrap=True)
    elif labels:
        table.add_column(f"largest of {len(labels)} {_plural(event.label_kind)}")
    for share, cells, numbers in zip(event.shares, rows, counts, strict=True):
        texts = [Text(cell) for cell in cells]
        if by_label:
            texts += [Text(number) for number in numbers]
        elif labels:
            texts.append(Text(_largest(share, labels)))
        table.add_row(*texts)
    return table


_HEADS = ["site", "cloud", "train", "held out"]


def _site_cells(share: SiteShare) -> list[str]:
    # A region is left out where it only says the site's name again.
    region = "" if share.region in share.site else share.region
    return [
        printable(share.site),
        printable(f"{share.cloud} {region}".strip()),
        f"{share.train_examples:,}",
        f"{share.held_out_examples:,}",
    ]


def _width(fixed: list[list[str]], labelled: list[list[str]]) -> int:
    """Columns that a table of these cells takes; heads come first."""
    cells = [*zip(*fixed, strict=True), *zip(*labelled, strict=True)]
    return sum(max(map(len, column)) + _GAP for column in cells)


def _plural(kind: str) -> str:
    return "classes" if kind == "class" else f"{kind}s"


def _largest(share: SiteShare, labels: list[str]) -> str:
    order = sorted(range(len(labels)), key=lambda i: -share.counts[i])
    named = [f"{labels[i]} {share.counts[i]:,}" for i in order if share.counts[i]]
    more = len(named) - NUM_LARGEST
    return ", ".join(named[:NUM_LARGEST]) + (f" and {more} more" if more > 0 else "")
