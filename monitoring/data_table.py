"""Who holds what, as a table for a terminal."""

from rich.table import Table
from rich.text import Text

from federation.events import DataDistributed, SiteShare

# Above so many classes or groups a site's largest are named instead of all.
MAX_COLUMNS = 12
NUM_LARGEST = 3


def data_table(event: DataDistributed) -> Table:
    """Draw the training and held-out examples of every site."""
    by_label = 0 < len(event.labels) <= MAX_COLUMNS
    table = Table(title="Who holds what", title_justify="left", pad_edge=False)
    table.add_column("site")
    table.add_column("cloud")
    table.add_column("train", justify="right")
    table.add_column("held out", justify="right")
    if by_label:
        for label in event.labels:
            table.add_column(f"{event.label_kind} {label}", justify="right")
    elif event.labels:
        table.add_column(f"largest of {len(event.labels)} {event.label_kind}s")
    for share in event.shares:
        cells: list[str | Text] = [
            Text(share.site),
            Text(f"{share.cloud} {share.region}".strip()),
            f"{share.train_examples:,}",
            f"{share.held_out_examples:,}",
        ]
        if by_label:
            cells += [f"{count:,}" for count in share.counts]
        elif event.labels:
            cells.append(Text(_largest(share, event.labels)))
        table.add_row(*cells)
    return table


def _largest(share: SiteShare, labels: tuple[str, ...]) -> str:
    order = sorted(range(len(labels)), key=lambda i: -share.counts[i])
    named = [f"{labels[i]} {share.counts[i]:,}" for i in order if share.counts[i]]
    more = len(named) - NUM_LARGEST
    return ", ".join(named[:NUM_LARGEST]) + (f" and {more} more" if more > 0 else "")
