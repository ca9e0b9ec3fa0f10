"""Hypothesis strategies for everything that ``federation.wire.frame`` can carry."""

import numpy as np
from hypothesis import strategies as st

from federation.messages import (
    Energy,
    FailureKind,
    LeaveReason,
    MaskedUpdate,
    MetricSums,
    Phase,
    PrivacySpent,
    Resources,
    RoundTask,
    SecureAnswer,
    SecureStep,
    SecureTask,
    SiteEvaluation,
    SiteFailure,
    SiteUpdate,
    TaskKind,
)
from federation.wire import frame as wire

counts = st.integers(0, wire.MAX_COUNT)
names = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?", fullmatch=True)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
seconds = st.floats(0, allow_infinity=False)
lines = st.text(max_size=64).map(wire.one_line)
# In the words of any codec.
float_vectors = st.builds(
    lambda data, dtype: np.frombuffer(data[: len(data) // 4 * 4], dtype=dtype),
    st.binary(max_size=400),
    st.sampled_from([np.float32, np.float16, np.uint16, np.uint8]),
)
integer_vectors = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(
    lambda values: np.array(values, dtype=np.int64)
)
byte_vectors = st.binary(max_size=400).map(
    lambda data: np.frombuffer(data, dtype=np.uint8)
)
header_vectors = st.lists(
    st.integers(0, 2**64 - 1), max_size=wire.MAX_MASKED_HEADER_WORDS
).map(lambda values: np.array(values, dtype=np.uint64))
bodies = st.binary(max_size=200)
sums = st.builds(
    MetricSums,
    count=counts,
    loss_sum=st.floats(),
    metrics=st.fixed_dictionaries({"correct": counts}),
)
phases = st.lists(
    st.builds(Phase, name=lines, start_seconds=seconds, seconds=seconds), max_size=5
).map(tuple)
epsilons = st.floats(min_value=0, allow_infinity=False)
spents = st.none() | st.builds(
    PrivacySpent,
    epsilon=epsilons,
    delta=st.floats(0, 1, exclude_min=True, exclude_max=True),
    held_out_epsilon=st.none() | epsilons,
)
ranges = st.tuples(seconds, seconds).map(lambda ends: (min(ends), max(ends)))
energies = st.builds(
    Energy, joules=st.none() | ranges, grams=st.none() | ranges, method=lines
)
resources = st.none() | st.builds(
    Resources,
    busy_seconds=seconds,
    cpu_seconds=st.none() | seconds,
    peak_memory_bytes=st.none() | counts,
    method=lines,
    energy=st.none() | energies,
)
about = {"run_id": names, "round_index": counts, "site": names}
model = {"based_on": counts, "fragment": counts}
answer = model | {"leaving": st.none() | st.sampled_from(LeaveReason)}
tasks = st.builds(
    RoundTask,
    changed_to=st.just("") | digests,
    counted=counts,
    **about,
    **model,
    kind=st.sampled_from(TaskKind),
    layout_digest=digests,
    weights_d=float_vectors,
    integers_m=integer_vectors,
    evaluate=st.booleans(),
    evaluate_after=st.booleans(),
    secure=bodies,
)
updates = st.builds(
    SiteUpdate,
    **about,
    **answer,
    layout_digest=digests,
    delta_d=float_vectors,
    integers_m=integer_vectors,
    num_examples=counts,
    num_steps=counts,
    training=st.none() | sums,
    evaluation=st.none() | sums,
    evaluation_after=st.none() | sums,
    phases=phases,
    resources=resources,
    spent=spents,
)
evaluations = st.builds(
    SiteEvaluation, **about, **answer, evaluation=sums, phases=phases, spent=spents
)
failures = st.builds(
    SiteFailure, **about, kind=st.sampled_from(FailureKind), message=lines
)
step = {"step": st.sampled_from(SecureStep), "body": bodies}
secure_tasks = st.builds(SecureTask, **about, **step)
secure_answers = st.builds(SecureAnswer, **about, **step)
masked_updates = st.builds(
    MaskedUpdate,
    **about,
    **answer,
    layout_digest=digests,
    words=byte_vectors,
    header_h=header_vectors,
    body=bodies,
    spent=spents,
)
messages = st.one_of(
    *(tasks, updates, evaluations, failures),
    *(secure_tasks, secure_answers, masked_updates),
)
