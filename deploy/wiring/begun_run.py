"""Which run a folder belongs to, and who may continue it."""

import contextlib
import tomllib

from aggregator.checkpoint_objects import BadCheckpoint, CheckpointObjects
from cloud_adapters.storage.disk.store import LocalStore
from federation.errors import CheckpointMismatch
from federation.ids import RunId
from federation.job import job_digest
from federation.job.job_extension import check_same
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.views.run_view import DEPLOYED
from privacy.dp.ledger.ledger_files import LEDGER_NAME, is_begun, read_file

# These train the same weights, bit for bit, so each continues a run of the other.
_ALIKE = frozenset({"inproc", "flower"})


def check_engine(run: RunFolder, engine: str) -> None:
    """Refuse to continue a run with sites of another kind.

    Simulated sites have the job's own data, and the time of a virtual run is its own:
    the rest of the run would be another experiment under the same name.

    Raises:
        CheckpointMismatch: Another engine began the run, or it belongs to the
            aggregator's service; the message says how to resume it.
        CorruptObject: The record is damaged.
        StoreUnavailable: The record cannot be read.
    """
    begun = run.engines()
    simulated = begun - {DEPLOYED}
    if engine != DEPLOYED and (run.is_submitted() or DEPLOYED in begun):
        raise CheckpointMismatch(
            f"{run.path} holds a deployed run, whose sites are machines of their own: "
            "resume it on the aggregator's host with crossfed run JOB --aggregator "
            "AGGREGATOR.TOML --resume, or simulate the job in another folder (--out)"
        )
    if engine == DEPLOYED and simulated:
        raise CheckpointMismatch(
            f"{run.path} has rounds of simulated sites (engine "
            f"{', '.join(sorted(simulated))}), so it cannot continue as a deployed "
            "run: submit the job again with crossfed run, without --resume"
        )
    odd = simulated - (_ALIKE if engine in _ALIKE else {engine})
    if odd:
        raise CheckpointMismatch(
            f"{run.path} was started with --engine {min(odd)}, and not {engine}: "
            f"resume it with --engine {min(odd)}, or choose another folder with --out"
        )


def check_job(run: RunFolder, job: JobSpec) -> None:
    """Refuse to continue a run with another job than its own.

    A job file that is missing or damaged is written again when the run starts; what
    the run's checkpoints and ledgers say of its job is still checked then.

    Raises:
        CheckpointMismatch: The jobs differ; the message names every key that does.
        CorruptObject: The run's record is damaged.
        StoreUnavailable: The record cannot be read.
    """
    try:
        kept = tomllib.loads(run.job.read_text("utf-8"))
    except (OSError, ValueError):
        return
    check_same(
        job_digest.deciding(job),
        job_digest.what_decides(kept),
        where=str(run.job),
        extensions=run.extensions(),
    )


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
