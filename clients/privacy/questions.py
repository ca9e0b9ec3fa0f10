"""Which questions of statistics a site answers, over all runs on the same data.

Noised sums are charged to the ledger. Exact ones are not, and two of them can be taken
from one another: bins that are shifted by a year show how many are of one age, and the
same question before and after a record came is that record. Nobody can say which
questions are harmless together (Dinur and Nissim 2003, doi:10.1145/773153.773173). So
a site answers few different exact questions about its data, and none again once the
data have changed. Sums of other sites are the business of
``clients.privacy.cohorts``.
"""

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from clients.data.datasets import Dataset, columns_of
from clients.data.tables import Words
from clients.privacy.site_memory import Document, SiteMemory
from clients.statistics.columns import with_derived
from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec

DOCUMENT = "questions"
_COLUMNS = "exact-columns"


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
        JobError: It is one too many, or the data have changed since it was asked.
        StoreError: The memory cannot be read or written.
    """
    question, content = _question(job), _content(job, data)

    def add(document: Document) -> Document:
        known = dict(document.get(dataset, {}))
        fault = _fault(known, question, content, most)
        if fault:
            raise JobError(
                f"this site {fault}; set privacy.differential_privacy, whose noise is "
                "charged, or ask the site's operator "
                "(policy.statistics.exact_questions)",
                key="statistics",
                remedy={"policy.statistics": {"exact_questions": len(known) + 1}},
            )
        return {**document, dataset: {**known, question: content}}

    memory.update(DOCUMENT, add)
    asked = () if job.statistics is None else job.statistics.columns
    names = {name for spec in asked for name in spec.names}
    memory.update(
        _COLUMNS,
        lambda known: {**known, dataset: sorted({*known.get(dataset, ()), *names})},
    )


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
    answered = memory.read(_COLUMNS).get(dataset, ())
    return [name for name in job.training.moments if name in answered]


def _fault(known: Mapping[str, str], question: str, content: str, most: int) -> str:
    """Why an exact question stays without an answer; empty if it is answered."""
    if known.get(question, content) != content:
        return (
            "has answered exactly this question when its data were others, and the "
            "difference would show the records that changed"
        )
    if question not in known and len(known) >= most:
        return (
            f"answers {most} different exact questions about its data, and has done "
            "so: together they would show single records"
        )
    return ""


def _question(job: JobSpec) -> str:
    """Digest of what is asked; not of whom, nor in which run."""
    text = json.dumps(job_file.document(job)["statistics"], sort_keys=True)
    return hashlib.sha256(b"crossfed/question\0" + text.encode()).hexdigest()


def _content(job: JobSpec, data: Dataset) -> str:
    """Digest of every value that is asked about, in the order of the records."""
    found = hashlib.sha256(b"crossfed/columns\0")
    asked = () if job.statistics is None else job.statistics.columns
    names = sorted(name for spec in asked for name in spec.names)
    columns = with_derived(columns_of(data)[0], names)
    for name in names:
        column = columns[name]
        found.update(f"{name}\0{len(data)}\0".encode())
        if isinstance(column, Words):
            found.update(json.dumps(column.values).encode())
            column = column.codes
        found.update(np.ascontiguousarray(column).tobytes())
    return found.hexdigest()
