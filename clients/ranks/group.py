"""The processes of a site's ranks: start, ask, watch, end.

One site is one machine here, so nothing of torchrun's rendezvous is needed: its store
listens on every interface, and its workers get all that is in its own environment. A
group lives and dies as one: if a rank is lost, all are ended and others take their
place.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from clients.data.batches import Rank
from clients.ranks.control import Channel, ErrorReply, Message, RankInputs, Ready, Start
from clients.ranks.shared_model import SharedModel
from federation.errors import FederationError, ProtocolError, SiteError

# Gloo and NCCL listen only on the loopback interface. Without the level there is a
# warning in every round, of parameters that might have been unused and were not.
_VARIABLES: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class RankLost(FederationError):
    """A process of the group has ended, or does not speak any more."""


class RankGroup:
    """Ranks of a site, started when they are needed; for one thread."""

    def __init__(
        self,
        module: str,
        *,
        num_ranks: int,
        environment: Mapping[str, str],
        start: Start,
        memory: SharedModel,
    ) -> None:
        """Note what is needed; nothing is started yet.

        Args:
            module: What a rank runs, as ``python -m`` names it; it calls
                ``clients.training.rank.serve``.
            num_ranks: How many.
            environment: All environment variables that ranks see.
            start: The first message to each rank.
            memory: Where the model's values are; the caller closes it.
        """
        self._command = (sys.executable, "-P", "-m", "crossfed.child", module)
        self._num_ranks = num_ranks
        self._environment = {**environment, **_VARIABLES}
        self._start = start
        self._memory = memory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._are_ready = False

    @property
    def pids(self) -> Sequence[int]:
        """Process ids by rank; empty if none runs."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start the processes if there are none; do not wait until they are ready.

        Raises:
            SiteError: The system does not let us.
        """
        if self._processes:
            return
        meeting = os.memfd_create("meeting")
        try:
            for rank in range(self._num_ranks):
                self._start_one(Rank(rank=rank, world_size=self._num_ranks), meeting)
        except OSError as error:
            self.end()
            raise SiteError(
                f"site {self._start.site!r} cannot start its ranks: {error.strerror}"
            ) from error
        finally:
            os.close(meeting)

    def ask(self, question: Message) -> Message:
        """Ask all ranks, and return what the first one answers.

        Raises:
            RankLost: One of them died.
            SiteError: One of them failed in a way that another attempt will not fix.
        """
        self.start()
        if not self._are_ready:
            self._exchange(self._start)
            self._are_ready = True
        return self._exchange(question)

    def end(self) -> None:
        """End the processes, whatever they do; they hold nothing."""
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._channels, self._processes, self._are_ready = [], [], False

    def _start_one(self, rank: Rank, meeting: int) -> None:
        mine, its = socket.socketpair()
        with its:
            self._channels.append(Channel(mine))
            inherited = RankInputs(
                rank=rank,
                pipe=its.fileno(),
                meeting=meeting,
                memory=self._memory.file,
            )
            process = subprocess.Popen(  # noqa: S603 -- our own code, no shell
                [*self._command, *inherited.arguments()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=2,  # What a model prints is log.
                pass_fds=(its.fileno(), meeting, self._memory.file),
                process_group=0,  # Only the agent handles Ctrl-C.
            )
        self._processes.append(process)

    def _exchange(self, question: Message) -> Message:
        """Send to all and hear all; the first failure or death ends it."""
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send(question)
                except OSError:
                    raise RankLost(self._last_words(rank)) from None
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(answers) < self._num_ranks:
                for key, _ in selector.select():
                    answers[key.data] = self._hear(key.data)
                    selector.unregister(key.fileobj)
        return answers[0]

    def _hear(self, rank: int) -> Message:
        try:
            answer = self._channels[rank].receive()
        except EOFError:
            raise RankLost(self._last_words(rank)) from None
        if isinstance(answer, ErrorReply):
            if self._are_ready:
                raise SiteError(f"rank {rank}: {answer.message}")
            # Errors in the data go only to the site's own log.
            raise SiteError(
                f"rank {rank} of site {self._start.site!r} cannot start; the site's "
                "log says why"
            )
        if isinstance(answer, Ready) == self._are_ready:
            raise ProtocolError(f"rank {rank} sent an unexpected answer")
        return answer

    def _last_words(self, rank: int) -> str:
        """Say how a rank ended."""
        try:
            # Its pipe is closed: it is ending.
            status = self._processes[rank].wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"rank {rank} closed its connection"
        if status < 0:
            return f"rank {rank} was killed by {signal.Signals(-status).name}"
        return f"rank {rank} ended with exit code {status}"
