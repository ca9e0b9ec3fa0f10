"""The meaning of an error in place of a reply.

The codes are those of ``flwr.common.constant.ErrorCode``, which is not public.
"""

from flwr.app import Message

from federation.messages import FailureKind, RoundMessage, SiteFailure
from federation.rounds.failures import failure

# The site's own doing.
CRASHES = frozenset({1, 2, 6, 7, 8})
# Flower does not have the message, or the reply, any more.
LOST = frozenset({3, 4})
NODE_GONE = 5


def failure_of(task: RoundMessage, message: Message) -> SiteFailure:
    """What it means for the site."""
    code = message.error.code
    kind = FailureKind.UNREACHABLE
    if code in CRASHES:
        kind = FailureKind.CRASHED
    elif code == NODE_GONE:
        kind = FailureKind.DISCONNECTED
    return failure(task, kind, f"Flower error {code}: {gist(message.error.reason)}")


def gist(reason: str | None) -> str:
    """Drop the traceback that Ray puts before what a process raised."""
    return (reason or "").rpartition("occurred. Message: ")[2].strip()
