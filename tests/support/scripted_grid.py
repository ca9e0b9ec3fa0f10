"""A grid whose replies a test makes itself."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from federation.ids import SiteId, TaskId
from federation.messages import Reply, SiteMessage, Task


def reply_to(message: SiteMessage, task_id: int = 0, **fields: float) -> Reply:
    """A message as it arrived."""
    chosen = {"asked_seconds": 0.0, "answered_seconds": 1.0} | fields
    numbers = {"bytes_down": 0, "bytes_up": 0} | chosen
    return Reply(task_id=TaskId(task_id), message=message, **numbers)  # type: ignore[arg-type]


class ScriptedGrid:
    """Hands on what ``play`` makes of tasks, one reply at a time.

    Attributes:
        withdrawn: What every call of ``withdraw`` named.
    """

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self.withdrawn: list[set[TaskId]] = []
        self._replies: Iterator[Reply] = iter(())
        self._num_sent = 0

    def play(self, tasks: Sequence[tuple[TaskId, Task]]) -> Iterable[Reply]:
        """Make the replies; for a subclass."""
        raise NotImplementedError

    def send(
        self,
        tasks: Sequence[Task],
        *,
        deadline_seconds: float,  # noqa: ARG002 -- of the seam
    ) -> Sequence[TaskId]:
        """Begin to play."""
        ids = self.number(tasks)
        self._replies = iter(self.play([*zip(ids, tasks, strict=True)]))
        return ids

    def number(self, tasks: Sequence[Task]) -> Sequence[TaskId]:
        """Give tasks their ids."""
        first = self._num_sent
        self._num_sent += len(tasks)
        return [TaskId(first + index) for index in range(len(tasks))]

    def receive(
        self,
        timeout_seconds: float | None = None,  # noqa: ARG002 -- of the seam
    ) -> deque[Reply]:
        """Take the next reply."""
        found: deque[Reply] = deque()
        for one in self._replies:
            found.append(one)
            break
        return found

    def withdraw(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, int]:
        """Note it."""
        self.withdrawn.append(set(task_ids))
        return {}

    def returned(
        self,
        sites: Collection[SiteId],
        round_index: int,  # noqa: ARG002 -- of the seam
    ) -> Collection[SiteId]:
        """All of them."""
        return sites
