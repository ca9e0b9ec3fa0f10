"""Which run a folder belongs to, where a process was killed before its first event."""

import contextlib

from aggregator.checkpoint_objects import BadCheckpoint, CheckpointObjects
from cloud_adapters.storage.disk.store import LocalStore
from federation.errors import CheckpointMismatch
from federation.ids import RunId
from monitoring.runs.run_folder import RunFolder
from privacy.dp.ledger.ledger_files import LEDGER_NAME, is_begun, read_file


def begun_id(run: RunFolder) -> RunId | None:
    """The run whose ledgers or checkpoints are in a folder that lacks its first event.

    Sites open their ledgers before it, so that is what a process leaves that is killed
    in between; with checkpoints, the event log was lost. Their run goes on: another one
    could not use them.

    Returns:
        None without an event log, or if there are neither, or those of several runs.

    Raises:
        LedgerDamaged: A ledger is damaged.
        StoreUnavailable: One cannot be read.
    """
    if not run.exists():
        return None
    paths = run.path.glob(f"sites/*/{LEDGER_NAME}")
    ids = {read_file(path).terms.run_id for path in paths if is_begun(path)}
    checkpoints = CheckpointObjects(LocalStore(run.path), "checkpoints/")
    for key in checkpoints.manifest_keys():
        with contextlib.suppress(BadCheckpoint, CheckpointMismatch):  # As on loading.
            ids.add(checkpoints.read_manifest(key).run_id)
    return RunId(*ids) if len(ids) == 1 else None
