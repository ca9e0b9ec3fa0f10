"""One exchange with the sites: send tasks, and take replies until all have one."""

from collections.abc import Iterator, Sequence

from federation.messages import Reply, Task
from federation.protocols import Grid


def exchange(
    grid: Grid, tasks: Sequence[Task], *, deadline_seconds: float
) -> Iterator[Reply]:
    """Send tasks and yield every reply until all tasks are closed.

    Among the replies are those to earlier tasks. Nothing else may receive from the grid
    meanwhile. What is still open when the caller stops is withdrawn.

    Raises:
        ValueError: A task is for a site that the grid does not have.
    """
    still_open = set(grid.send(tasks, deadline_seconds=deadline_seconds))
    try:
        while still_open:
            replies = grid.receive()
            if not replies:
                return
            while replies:
                still_open.discard(replies[0].task_id)
                yield replies.popleft()  # Only the receiver holds an update now.
    finally:
        grid.withdraw(still_open)
