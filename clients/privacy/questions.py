"""Which questions of statistics a site answers, over all runs on the same data.

Noised sums are charged to the ledger. Exact ones are not, and two of them can be taken
from one another: bins that are shifted by a year show how many are of one age, and the
same question before and after a record came is that record. Nobody can say which
questions are harmless together (Dinur and Nissim 2003, doi:10.1145/773153.773173). So
a site answers few different exact questions about its data, and none about a column
that has changed since it answered another one. Sums of other sites are the business of
``clients.privacy.cohorts``.

The second round of quantiles asks where the aggregator says that they are. Other places
are another question, however the job reads.

A document ``questions`` has, by dataset, the number of ``records``, a digest of each of
the ``columns`` that was asked about, and the ``questions``: digests, each with those of
the places that were asked for.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from clients.data.datasets import Dataset, columns_of
from clients.data.tables import Words
from clients.privacy.site_memory import Document, SiteMemory
from clients.statistics.columns import with_derived
from federation.errors import CorruptObject, JobError
from federation.job import job_file
from federation.job.spec import JobSpec

DOCUMENT = "questions"

Questions = Mapping[str, Sequence[str]]


def note_question(
    memory: SiteMemory, dataset: str, job: JobSpec, data: Dataset, *, most: int
) -> None:
    """Remember an exact question before it is answered, durably.

    Args:
        memory: The site's.
        dataset: The operator's name for the data.
        job: The job of statistics, without differential privacy.
        data: The site's training records.
        most: Different questions that the operator allows.

    Raises:
        JobError: It is one too many, or the data have changed since another was asked.
        StoreError: The memory cannot be read or written, or is of another form.
    """
    question, columns = _question(job), _columns(job, data)

    def add(document: Document) -> Document:
        known = _known(document, dataset)
        before = known["columns"]
        changed = [
            f"{n!r:.80}" for n in columns if before.get(n, columns[n]) != columns[n]
        ]
        if known["records"] not in {None, len(data)}:
            changed = ["its records"]
        if changed:
            raise _refused(
                f"has answered an exact question when {', '.join(changed)} had other "
                "values, and the difference would show the records that changed"
            )
        questions = {question: [], **known["questions"]}
        _check_number(known["questions"], questions, most)
        columns_now = {**known["columns"], **columns}
        after = {"records": len(data), "columns": columns_now, "questions": questions}
        return {**document, dataset: after}

    memory.update(DOCUMENT, add)


def exact_moments(memory: SiteMemory, dataset: str, job: JobSpec) -> list[str]:
    """Columns of a job's moments about which the site has answered exact questions.

    That moments are noised is the aggregator's word (``training.moments_privacy``): it
    could send those of an exact run. They can tell of this site's records only if the
    site itself has answered exactly about these columns.

    Args:
        memory: The site's.
        dataset: The operator's name for the data.
        job: The job that was proposed.

    Raises:
        StoreError: The memory cannot be read.
    """
    answered = _known(memory.read(DOCUMENT), dataset)["columns"]
    return [name for name in job.training.moments if name in answered]


def note_places(
    memory: SiteMemory, dataset: str, job: JobSpec, places: Sequence[int], *, most: int
) -> None:
    """Remember where a question looks for quantiles before it is answered, durably.

    Args:
        memory: The site's, which has noted the question.
        dataset: The operator's name for the data.
        job: The job of statistics, without differential privacy.
        places: Number of the coarse bin of each quantile.
        most: Different questions that the operator allows.

    Raises:
        JobError: The same question with other places is one too many.
        StoreError: The memory cannot be read or written, or is of another form.
    """
    question = _question(job)
    text = json.dumps([*places])
    digest = hashlib.sha256(b"crossfed/places\0" + text.encode()).hexdigest()

    def add(document: Document) -> Document:
        known = _known(document, dataset)
        before = known["questions"].get(question, [])
        after = before if digest in before else [*before, digest]
        questions = {**known["questions"], question: after}
        _check_number(known["questions"], questions, most)
        return {**document, dataset: {**known, "questions": questions}}

    memory.update(DOCUMENT, add)


def _known(document: Document, dataset: str) -> Document:
    """What is remembered of a dataset.

    Raises:
        CorruptObject: It is of another form: what it promises cannot be read.
    """
    nothing: Document = {"records": None, "columns": {}, "questions": {}}
    known = document.get(dataset, nothing)
    if not isinstance(known, dict) or known.keys() != nothing.keys():
        raise CorruptObject(
            f"the site's memory of exact questions about {dataset!r:.80} has another "
            "form than this release writes, so it answers none about these data: use "
            "the release that wrote it, or privacy.differential_privacy"
        )
    return dict(known)


def _check_number(before: Questions, after: Questions, most: int) -> None:
    """Refuse a question too many; one with other places counts as another."""
    num = sum(max(1, len(places)) for places in after.values())
    if after != before and num > most:
        raise _refused(
            f"answers {most} different exact questions about its data, and has done "
            "so: together they would show single records",
            exact_questions=num,
        )


def _refused(fault: str, **remedy: int) -> JobError:
    return JobError(
        f"this site {fault}; set privacy.differential_privacy, whose noise is charged"
        + ", or ask the site's operator (policy.statistics.exact_questions)"
        * bool(remedy),
        key="statistics",
        remedy={"policy.statistics": remedy} if remedy else {},
    )


def _question(job: JobSpec) -> str:
    """Digest of what is asked; not of whom, nor in which run."""
    text = json.dumps(job_file.document(job)["statistics"], sort_keys=True)
    return hashlib.sha256(b"crossfed/question\0" + text.encode()).hexdigest()


def _columns(job: JobSpec, data: Dataset) -> Mapping[str, str]:
    """Digest of each column that is asked about, in the order of the records."""
    asked = () if job.statistics is None else job.statistics.columns
    names = sorted(name for spec in asked for name in spec.names)
    columns = with_derived(columns_of(data)[0], names)
    found = dict[str, str]()
    for name in names:
        column, digest = columns[name], hashlib.sha256(b"crossfed/column\0")
        if isinstance(column, Words):
            digest.update(json.dumps(column.values).encode())
            column = column.codes
        digest.update(f"\0{len(data)}\0".encode())
        digest.update(np.ascontiguousarray(column).tobytes())
        found[name] = digest.hexdigest()
    return found
