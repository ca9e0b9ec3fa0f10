"""What owners ask of the aggregator from elsewhere, with their tokens.

One path, ``POST /owner``, beside enrolment and behind the proxy. A request is JSON with
the secret of a token and an action. Whoever has no valid token gets one and the same
answer, before anything else of the request is looked at; an owner sees and stops its
own runs, and those of others do not exist for it.

A job of an owner is run by this host's coordinator. So it may name only functions that
the operator lists, and no place of this host or of its clouds.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from clients.privacy.site_policy import is_accepted
from deploy.aggregator_host import admission, owners, run_queue
from deploy.aggregator_host.config import AggregatorConfig
from deploy.aggregator_host.owners import Owner
from deploy.aggregator_host.parties import submitted
from deploy.aggregator_host.run_queue import QueuedRun
from federation.errors import FederationError, JobError
from federation.job import code_files, job_file
from federation.job.metrics import is_function
from federation.job.spec import JobSpec
from federation.job.storage_job import StorageSpec
from federation.protocols import Clock
from privacy.membership import messages

# Runs of one owner that have not ended; more would only fill the disk.
MAX_OPEN_RUNS = 100
MAX_EVENT_BYTES = 1 << 20  # of an answer
_UNKNOWN = (
    HTTPStatus.FORBIDDEN,
    messages.refusal("this token is unknown or revoked: ask the aggregator's operator"),
)
# A text that a function could take for a file of this host or an address.
_PLACE = re.compile(r"[/\\]|^~")

_LOG = logging.getLogger(__name__)
_Answer = tuple[int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerService:
    """Answers owners; threads may share it.

    Attributes:
        config: The operator's ``aggregator.toml``.
        clock: Tells time.
        listener: Called with a word about every submission and stop.
    """

    config: AggregatorConfig
    clock: Clock
    listener: Callable[[str], None] = _LOG.info

    def handle(self, body: bytes) -> _Answer:
        """Answer one request; status and body in HTTP's terms."""
        asked = _parsed(body)
        try:
            owner = self._owner(asked)
            if owner is None:
                return _UNKNOWN
            answer = self._answer(owner, asked)
        except FederationError as error:
            return HTTPStatus.BAD_REQUEST, messages.refusal(str(error))
        return HTTPStatus.OK, json.dumps(answer).encode()

    def _owner(self, asked: Mapping[str, Any]) -> Owner | None:
        """Whose token a request has."""
        try:
            secret = bytes.fromhex(asked.get("secret", ""))
        except (ValueError, TypeError):
            secret = b""
        return owners.read(self.config.folder).of_secret(secret)

    def _answer(self, owner: Owner, asked: Mapping[str, Any]) -> Any:
        action = asked.get("action")
        if action == "runs":
            return self._rows(owner)
        if action == "submit":
            return self._submit(owner, asked)
        one = self._find(owner, str(asked.get("run", "")))
        if action == "events":
            return self._events(owner, one, asked.get("offset"))
        if action == "stop":
            if one.outcome is not None:
                raise FederationError(f"run {one.name} has ended already")
            who = f"owner {owner.name}"
            run_queue.ask_to_stop(one.run, at=self.clock.now(), who=who)
            self.listener(f"owner {owner.name} stops run {one.name}")
            return {"run": one.name, "begun": one.coordinator is not None}
        raise FederationError(f"there is no action {action!r:.40}")

    def _rows(self, owner: Owner) -> list[dict[str, Any]]:
        runs = run_queue.handed_over(self.config.runs).runs
        return admission.rows(self.config, runs, now=self.clock.now(), owner=owner.name)

    def _waits(self, owner: Owner, one: QueuedRun) -> str:
        """What a run of an owner waits for, without the names of others' runs."""
        if one.outcome is not None or one.coordinator is not None:
            return ""
        runs = run_queue.handed_over(self.config.runs).runs
        mine = {each.name for each in runs if each.request.owner == owner.name}
        now = self.clock.now()
        waits = admission.admission(self.config, runs, None, now=now).plan().waits
        return waits[one.name].text(mine.__contains__) if one.name in waits else ""

    def _find(self, owner: Owner, name: str) -> QueuedRun:
        """Find a run of an owner by ID, or the newest of a job.

        Raises:
            FederationError: The owner has none of this name; others do not matter.
        """
        for one in reversed(run_queue.handed_over(self.config.runs).runs):
            is_named = name in {one.name, one.run.path.parent.name}
            if is_named and one.request.owner == owner.name:
                return one
        raise FederationError(f"you have no run {name!r:.80}: see crossfed ps")

    def _submit(self, owner: Owner, asked: Mapping[str, Any]) -> Any:
        text, priority = asked.get("job"), asked.get("priority", 0)
        if not isinstance(text, str) or type(priority) is not int:
            raise FederationError("a submission has the text of a job, and a priority")
        job = job_file.loads(text)
        check_job(job, self.config.file.queue.functions)
        runs = run_queue.handed_over(self.config.runs).runs
        mine = [each for each in runs if each.request.owner == owner.name]
        if sum(each.outcome is None for each in mine) >= MAX_OPEN_RUNS:
            raise FederationError(f"{MAX_OPEN_RUNS} of your runs have not ended")
        now = self.clock.now()
        admission.check_submission(self.config, job, owner.name, priority, now=now)
        run = submitted(
            job,
            self.config.folder,
            self.config.runs,
            at=now,
            random_bytes=os.urandom,
            owner=owner.name,
            priority=priority,
            who=f"owner {owner.name}",
        )
        self.listener(f"owner {owner.name} submits run {run.path.name}")
        return {"run": run.path.name}

    def _events(self, owner: Owner, one: QueuedRun, offset: Any) -> Any:
        """Whole lines of a run's events from an offset on, and how it stands."""
        if type(offset) is not int or offset < 0:
            raise FederationError("an offset is a whole number from 0")
        lines = b""
        if one.run.exists():
            with one.run.events.open("rb") as file:
                file.seek(offset)
                lines = file.read(MAX_EVENT_BYTES)
        lines = lines[: lines.rfind(b"\n") + 1]
        outcome = one.outcome
        return {
            "run": one.name,
            "lines": lines.decode(errors="replace"),
            "offset": offset + len(lines),
            "waits": self._waits(owner, one),
            "status": one.status,
            "code": None if outcome is None else outcome.code,
            "message": "" if outcome is None else outcome.message,
        }


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_job(job: JobSpec, functions: tuple[str, ...]) -> None:
    """Refuse a job of an owner that could do harm at the aggregator.

    Raises:
        JobError: The message names the key.
    """
    storage = StorageSpec(keep_checkpoints=job.storage.keep_checkpoints)
    if job.storage != storage:
        raise JobError("is the aggregator operator's choice: remove it", key="storage")
    if job.model.weights is not None:
        raise JobError("names a file of the aggregator's host", key="model.weights")
    # Sites alone load data, and each has its own rules for that.
    document = job_file.document(job)
    texts = code_files.texts(
        {table: document[table] for table in document.keys() - {"data", "storage"}}
    )
    for key, text in texts:
        if is_function(text):
            _check_function(text, functions, key)
        elif _PLACE.search(text):
            raise JobError(f"{text!r:.80} names a place or an address", key=key)


def _check_function(text: str, functions: tuple[str, ...], key: str) -> None:
    try:
        accepted = is_accepted(text, functions)
    except JobError as error:
        raise JobError(error.reason, key=key) from error
    if not accepted:
        raise JobError(
            f"the aggregator does not accept {text!r:.80} (queue.functions in its "
            "aggregator.toml)",
            key=key,
        )
