"""Apply a run's model to new data, and write what it predicts to a file.

.jsonl     a JSON object for each record, written batch by batch
.csv       a row for each record, likewise
.npz       NumPy arrays, one for each column
.parquet   a table (extra ``parquet``)
"""

import csv
import hashlib
import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from clients.data.datasets import Dataset
from clients.models.tokenizers import check_tokenizers, noted_tokenizers
from clients.privacy.public_moments import standardised
from clients.training.predictions import Columns, Predictor
from cloud_adapters.extras import naming_extras
from deploy.wiring.job_data import load_data
from federation.durable_files import replace_file
from federation.errors import JobError, ObjectExists, RunNotFound, SiteError
from federation.job.code_files import unpinned
from federation.job.spec import JobSpec
from monitoring.runs.run_folder import RunFolder
from monitoring.views.round_view import accuracy_of, loss_of, metrics_of

SPLITS = ("held_out", "train", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionsFile:
    """What was predicted.

    Attributes:
        sha256: SHA-256 of the model's file.
        path: The file of predictions.
        records: How many records it has.
        metrics: The task's results on these records by name; empty without labels.
    """

    run_id: str
    sha256: str
    path: str
    records: int
    metrics: Mapping[str, float]


def predict(
    run: RunFolder,
    source: str,
    options: Mapping[str, Any],
    *,
    out: Path,
    split: str = "held_out",
) -> PredictionsFile:
    """Write a run's predictions for the records of a data source.

    Args:
        run: A run that has left a model.
        source: ``module:function`` or the URL of a dataset; ``job`` for the data source
            of the run's own job, whose options are kept unless ``options`` has them.
        options: Options of the source.
        out: A new file, ending in ``.jsonl``, ``.csv``, ``.npz`` or ``.parquet``.
        split: Which part of the source: ``held_out``, ``train`` or ``all``, which has
            the training part first, and says of each record which one it is.

    Raises:
        RunNotFound: The run has no model yet.
        JobError: The source is unknown, or the file's name has another end.
        ObjectExists: The file is there.
        SiteError: The data is not what the model takes.
        MissingExtra: pyarrow is needed and not installed.
    """
    if out.suffix not in _WRITERS:
        raise JobError(f"must end in {', '.join(_WRITERS)}", key="--out")
    if out.exists():
        raise ObjectExists(f"{out} exists: choose another file, or remove it")
    if not run.model.is_file():
        raise RunNotFound(
            f"the run in {run.path} has no model yet: resume it until it completes"
        )
    job = run.read_spec()
    if source == "job" and job.privacy.differential_privacy.standardise is not None:
        raise JobError(
            "each site standardised its records by statistics that it keeps, and the "
            "job's source returns them as they are: name a source that standardises "
            "its records by their own mean and deviation",
            key="DATA",
        )
    train, held_out = standardised(job, source_of(run, source, options))
    parts = {"train": train, "held_out": held_out}
    chosen = parts if split == "all" else {split: parts[split]}
    predictor = Predictor(job, run.model)
    batches = chain.from_iterable(
        numbered(part, predictor.batches(data, part))
        if split == "all"
        else predictor.batches(data, part)
        for part, data in chosen.items()
    )
    replace_file(out, _WRITERS[out.suffix](batches))
    sums = predictor.metrics()
    named = {"loss": loss_of(sums), "accuracy": accuracy_of(sums), **metrics_of(sums)}
    with run.model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PredictionsFile(
        run_id=run.run_id() or run.path.name,
        sha256=digest,
        path=str(out),
        records=sum(map(len, chosen.values())),
        metrics={name: value for name, value in named.items() if value is not None},
    )


def source_of(
    run: RunFolder, source: str, options: Mapping[str, Any]
) -> tuple[Dataset, Dataset]:
    """Load a data source, or that of a run's job; see ``predict``.

    Raises:
        JobError: The source is unknown, or has loaded another tokeniser than the job
            names.
        SiteError: It failed.
    """
    job = run.read_spec()
    if source == "job":
        if job.data is None:
            raise JobError(
                "the job's sites have data of their own, so it names no source: name "
                f"one, as module:function or a URL{_example(job)}",
                key="DATA",
            )
        source, options = job.data.source, {**job.data.options, **options}
    with noted_tokenizers() as loaded:
        found = load_data(source, options, key="DATA")
    if loaded:  # Records here may have become numbers before.
        check_tokenizers(job, loaded, source=source)
    return found


def _example(job: JobSpec) -> str:
    """How to name the data of the first site that the job has it of."""
    for site in job.sites:
        if site.data is not None:
            words = [unpinned(site.data.source)]
            for name, value in site.data.options.items():
                words += ["--option", f"{name}={json.dumps(value)}"]
            said = shlex.join(words)
            return f", for example that of site {site.name!r}: {said}"
    return ""


def numbered(part: str, batches: Iterator[Columns]) -> Iterator[Columns]:
    """Add which part of the source each record is from, and its number there, from 0.

    Args:
        part: Name of the part.
        batches: Columns of predictions, in the order of the part.

    Raises:
        SiteError: An output of the model has the name of one of these columns.
    """
    start = 0
    for found in batches:
        if taken := found.keys() & {"part", "record_of_part"}:
            raise SiteError(
                f"the model returns {min(taken)!r}, which is also what names the place "
                "of a record with --split all: write each part to a file of its own "
                "(--split train, --split held_out)"
            )
        size = len(next(iter(found.values())))
        numbers = np.arange(start, start + size)
        yield {"part": np.full(size, part), "record_of_part": numbers, **found}
        start += size


def _json_lines(batches: Iterator[Columns]) -> Iterator[bytes]:
    """An object for each record, with its number in the file from 0 as ``record``."""
    number = 0
    for found in batches:
        rows = zip(*(values.tolist() for values in found.values()), strict=True)
        lines = []
        for row in rows:
            values = dict(zip(found, map(_finite, row), strict=True))
            lines.append(json.dumps({"record": number, **values}, allow_nan=False))
            number += 1
        yield ("\n".join(lines) + "\n").encode()


def _csv(batches: Iterator[Columns]) -> Iterator[bytes]:
    """A row for each record, with its number in the file from 0 as ``record``.

    A vector of numbers, such as probabilities, has a column for each; what has other
    shapes is JSON in one cell. NaN is an empty cell.

    Raises:
        JobError: Records have vectors of different lengths.
    """
    number, head = 0, list[str]()
    for found in batches:
        flat: dict[str, Sequence[Any]] = {}
        for name, values in found.items():
            if values.ndim == 2 and values.dtype.kind == "f":  # noqa: PLR2004
                flat |= {
                    f"{name}_{i}": each.tolist() for i, each in enumerate(values.T)
                }
            else:
                flat[name] = values.tolist()
        content = io.StringIO()
        writer = csv.writer(content, lineterminator="\n")
        if not head:
            head = ["record", *flat]
            writer.writerow(head)
        elif head != ["record", *flat]:
            raise JobError(
                "records have predictions of different shapes: write .jsonl",
                key="--out",
            )
        for row in zip(*flat.values(), strict=True):
            writer.writerow([number, *map(_cell, row)])
            number += 1
        yield content.getvalue().encode()


def _cell(value: Any) -> Any:
    value = _finite(value)
    return json.dumps(value) if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """A value for JSON, which has no word for NaN: null."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _npz(batches: Iterator[Columns]) -> Sequence[bytes]:
    columns = _joined(batches)
    content = io.BytesIO()
    np.savez(content, **columns)  # type: ignore[arg-type]
    return [content.getvalue()]


def _parquet(batches: Iterator[Columns]) -> Sequence[bytes]:
    with naming_extras():
        import pyarrow as pa  # noqa: PLC0415 -- an extra
        from pyarrow import parquet  # noqa: PLC0415
    columns = _joined(batches)
    content = io.BytesIO()
    table = pa.table({name: values.tolist() for name, values in columns.items()})
    parquet.write_table(table, content)
    return [content.getvalue()]


def _joined(batches: Iterator[Columns]) -> Columns:
    """All batches in one array a column.

    Raises:
        JobError: Records differ in shape.
    """
    found: dict[str, list[Any]] = {}
    for batch in batches:
        for name, values in batch.items():
            found.setdefault(name, []).append(values)
    try:
        return {name: np.concatenate(parts) for name, parts in found.items()}
    except ValueError as error:
        raise JobError(
            f"records have predictions of different shapes ({error}): write .jsonl",
            key="--out",
        ) from error


_WRITERS = {".jsonl": _json_lines, ".csv": _csv, ".npz": _npz, ".parquet": _parquet}
