"""Memory of a round at an aggregator and a site: vectors in memory, or in files.

    python benchmarks/model_memory.py [--values 25000000] [--sites 3] [--smoke]

Each row runs in a process of its own. Memory is the process's resident set, in models
of four bytes a value. The kernel's cache of files is not part of it. The digests show
that both ways give the same bits. Pieces that pass through memory have the same size
for every model, so files save less of a small one.

An aggregator folds updates that only map files, as they come out of a store, takes a
step of Nesterov momentum and saves a checkpoint, in each of two rounds. Memory counts
from before there was a model: its peak, and what stays between rounds. With secure
aggregation, in a ring of 32 bits or in four levels, it adds up words of a mask each,
takes all masks off and opens the sum.

A site encodes an update in four bits with error feedback, and stores what that leaves
out, in each of three rounds; or, with secure aggregation, in four levels with a mask.
Memory counts beyond the update and the model that training holds: its peak, and what
the residual takes while the site trains.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import machine
import numpy as np
from numpy.typing import NDArray

import crossfed
from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import weighted_mean
from clients.privacy.residual import Residual, stored
from clients.training.error_feedback import ErrorFeedback
from clients.training.site_state import Fact, KeptState, SiteState
from cloud_adapters.storage.disk.scratch import ScratchVectors
from cloud_adapters.storage.disk.store import LocalStore
from federation.clock import SystemClock
from federation.compression.choice import codec_of
from federation.compression.codec import Links
from federation.compression.rotation import Rotation, num_blocks, padded
from federation.ids import RunId, SiteId
from federation.job.spec import ServerOptimizerSpec
from federation.mapped import give_back
from federation.messages import RoundTask, TaskKind
from federation.protocols import LocalUpdate, RunState, WeightedUpdate
from federation.rounds.server_optimizer import server_optimizer, take_step
from federation.vectors import (
    Allocate,
    Arrays,
    Layout,
    Role,
    Vector,
    chunks,
    in_memory,
    is_finite,
    norm,
    place,
)
from privacy.keystream import KEY_BYTES, Mask, Words
from privacy.secagg.agreement import identity
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.agreement.roster import Roster, RosterEntry
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import LevelSum, rotation_of
from privacy.secagg.arithmetic.levels import LevelSite, next_plan
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.arithmetic.seal import seal_
from privacy.secagg.protocol.of_job import contract_of

RING, LEVELS = "aggregator, 32-bit ring", "aggregator, 4 levels"
SITE_LEVELS = "site, 4 levels"
PARTIES = ("aggregator", RING, LEVELS, "site", SITE_LEVELS)
WAYS = ("memory", "disk")
ROUNDS, SITE_ROUNDS, FLOAT_BYTES, KIB = 2, 3, 4, 1024
_PIECE = 1 << 20
RUN, SITE = RunId("r"), SiteId("a")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a small model")
    parser.add_argument("--party", choices=PARTIES, help="run one, in this process")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0], help="of that")
    asked = parser.parse_args(arguments)
    values = 1_000_000 if asked.smoke else asked.values
    if asked.party in {"site", SITE_LEVELS}:
        print(json.dumps(site(asked.party, asked.way, values)))
        return
    if asked.party:
        print(json.dumps(aggregator(asked.party, asked.way, values, asked.sites)))
        return
    print(json.dumps(machine.facts("model_memory", values=values, sites=asked.sites)))
    columns = "way     peak  between  seconds  (models)"
    print(f"{'party':24} {columns}", file=sys.stderr)
    for party, way in product(PARTIES, WAYS):
        size = ["--values", str(values), "--sites", str(asked.sites)]
        row = ["--party", party, "--way", way]
        command = [sys.executable, __file__, *size, *row]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(json.dumps(found))
        print(
            f"{party:24} {way:6} {found['peak_models']:5.2f} "
            f"{found['between_models']:8.2f} {found['seconds']:8.1f}",
            file=sys.stderr,
        )


def aggregator(party: str, way: str, values: int, sites: int) -> dict[str, object]:
    """Run two rounds."""
    layout = Layout.build([("weight", (values,), "float32", Role.PARAMETER)])
    optimizer = server_optimizer(ServerOptimizerSpec(name="nesterov", lr=0.7))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        updates = [_on_disk(folder / f"{site}", values, site) for site in range(sites)]
        allocate = ScratchVectors(folder=folder) if way == "disk" else in_memory
        mean_of: _MeanOf = _plain_mean
        if party != "aggregator":
            mean_of = _SecureMean(party, updates, folder, allocate).of_round
        checkpoints = RunCheckpoints(
            store=LocalStore(folder / "store"),
            prefix="checkpoints/",
            run_id="run",
            job={},
            layout=layout,
            keep=2,
            emit=lambda _event: None,
            clock=SystemClock(),
            allocate=allocate,
        )
        before = _kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
        start = time.perf_counter()
        theta_d, spare_d = allocate(values), allocate(values)
        moments = {
            key: place(moment_d, allocate)
            for key, moment_d in optimizer.init(values).items()
        }
        for index in range(1, ROUNDS + 1):
            delta_d = mean_of(updates, spare_d)
            norm(delta_d)
            new_d = take_step(
                optimizer, layout, weights_d=theta_d, moments=moments, delta_f=delta_d
            )
            theta_d, spare_d = new_d, theta_d
            assert all(map(is_finite, (theta_d, *moments.values())))
            state = RunState(
                round_index=index,
                weights_d=theta_d,
                integers_m=np.zeros(0, np.int64),
                optimizer=moments,
                rounds_completed=index,
                lost_in_a_row=0,
            )
            checkpoints.save(state)
        seconds = time.perf_counter() - start
        peak, after = _kib("VmHWM"), _kib("VmRSS")
        digest = hashlib.sha256(theta_d.data).hexdigest()
    model_kib = FLOAT_BYTES * values / KIB
    return {
        "party": party,
        "way": way,
        "peak_models": (peak - before) / model_kib,
        "between_models": (after - before) / model_kib,
        "seconds": seconds,
        "digest": digest[:16],
    }


def site(party: str, way: str, values: int) -> dict[str, object]:
    """Run three rounds: the first has no residual yet."""
    layout = Layout.build([("weight", (values,), "float32", Role.PARAMETER)])
    with tempfile.TemporaryDirectory() as place_:
        folder = Path(place_)
        theta_d = _on_disk(folder / "theta", values, 0)
        update_d, between = np.empty(values, np.float32), 0
        state = SiteState(
            SITE,
            layout,
            LocalStore(folder / "store"),
            codec="" if party == SITE_LEVELS else "int4",
            continues=party == SITE_LEVELS,
            allocate=ScratchVectors(folder=folder) if way == "disk" else in_memory,
        )
        encoder = _SecureEncoder(layout) if party == SITE_LEVELS else _Encoder()
        words = hashlib.sha256()
        update_d[:] = 0.0
        before = _kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
        start = time.perf_counter()
        for index in range(1, SITE_ROUNDS + 1):
            encoder.begin(state.before(RUN, index), index, theta_d)
            for piece in chunks(values):  # It trains.
                update_d[piece] = theta_d[piece] * np.float32(index)
                give_back(theta_d[piece])
            between = _kib("VmRSS")
            sent, arrays, facts = encoder.encode(theta_d, update_d)
            words.update(sent.data)
            state.keep(RUN, index, arrays, facts)
            del sent, arrays
        seconds, peak = time.perf_counter() - start, _kib("VmHWM")
    model_kib = FLOAT_BYTES * values / KIB
    return {
        "party": party,
        "way": way,
        "peak_models": (peak - before) / model_kib,
        "between_models": (between - before) / model_kib,
        "seconds": seconds,
        "digest": words.hexdigest()[:16],
    }


class _Encoder:
    """Four bits with error feedback."""

    def begin(self, kept: KeptState, index: int, theta_d: Vector) -> None:
        """Take what the last round left out."""
        links = Links(up=codec_of("int4"), feedback=1.0)
        self._feedback = ErrorFeedback(links, _task(RUN, SITE, index, theta_d))
        self._feedback.begin(kept, theta_d)

    def encode(
        self, theta_d: Vector, update_d: Vector
    ) -> tuple[NDArray[Any], Arrays, Mapping[str, Fact]]:
        """Encode an update; return it, and what is kept."""
        update = LocalUpdate(
            update_d=update_d,
            integers_m=np.zeros(0, np.int64),
            num_examples=1,
            num_steps=1,
            training=None,
        )
        sent = self._feedback.update(theta_d, update)
        arrays, facts = self._feedback.left()
        del self._feedback
        return sent, arrays, facts


class _SecureEncoder:
    """Four levels with error feedback, and a mask."""

    def __init__(self, layout: Layout) -> None:
        """Write the contract of four sites."""
        self._contract, self._index = _contract(layout), 0
        self._residual_d = np.empty(0, np.float32)

    def begin(self, kept: KeptState, index: int, theta_d: Vector) -> None:
        """Take what the last round left out."""
        self._index, before = index, stored(kept, self._contract)
        self._residual_d = (
            np.zeros(padded(theta_d.size), np.float32)
            if before is None
            else before.settled(self._contract, left_out=index == SITE_ROUNDS)
        )

    def encode(
        self, theta_d: Vector, update_d: Vector
    ) -> tuple[NDArray[Any], Arrays, Mapping[str, Fact]]:
        """Encode and mask an update; return it, and what is kept."""
        plan = next_plan(4, energies_b=np.ones(num_blocks(theta_d.size)), variance=1.0)
        assert plan is not None  # Of a sum that is not 0.
        encoder = LevelSite(
            plan=plan,
            digits=Digits(levels=4, num_sites=self._contract.num_sites),
            rotation=rotation_of(RUN),
            clip_norm=SITE_ROUNDS * 1.01 * theta_d.size**0.5,
        )
        mask = Mask(key=bytes(KEY_BYTES), sign=1)  # The same words in every run.
        sealed = encoder.seal_(
            update_d, weight=1.0, residual_d=self._residual_d, masks=[mask]
        )
        left = Residual(
            left_d=self._residual_d,
            words_w=sealed.words_w,
            plan=plan,
            round_index=self._index,
        )
        del self._residual_d
        return sealed.masked_w, left.arrays(), left.facts()


def _contract(layout: Layout) -> Contract:
    names = [f"site-{number}" for number in range(4)]
    keys = [identity.generate(os.urandom).public.key for _ in range(5)]
    job = crossfed.load_job(
        {
            "name": "memory",
            "rounds": SITE_ROUNDS,
            "model": {"factory": "clients.models:logistic_regression"},
            "data": {"source": "clients.data:digits"},
            "training": {"local_steps": 1},
            "sites": [{"name": name} for name in names],
            "privacy": {
                "secure_aggregation": {"enabled": True, "levels": 4, "clip_norm": 1.0}
            },
        }
    )
    roster = Roster(
        serial=1,
        aggregator_organisation="office",
        aggregator_key=keys[4],
        sites=tuple(
            RosterEntry(site=SiteId(name), organisation=name, public_key=key)
            for name, key in zip(names, keys, strict=False)
        ),
    )
    return contract_of(
        job, layout, run_id=RUN, roster=roster, promises=(), max_examples=1
    )


def _task(run: RunId, site: SiteId, index: int, theta_d: Vector) -> RoundTask:
    return RoundTask(
        run_id=run,
        round_index=index,
        site=site,
        kind=TaskKind.TRAIN,
        layout_digest="0" * 64,
        weights_d=theta_d,
        integers_m=np.zeros(0, np.int64),
        evaluate=False,
        evaluate_after=False,
        counted=index - 1,
    )


def _on_disk(path: Path, values: int, seed: int) -> Vector:
    """An update that only maps a file."""
    rng = np.random.default_rng(seed)
    pieces = (
        rng.standard_normal(min(_PIECE, values - start), np.float32)
        for start in range(0, values, _PIECE)
    )
    return _mapped(path, pieces).view(np.float32)


def _mapped(path: Path, arrays: Iterable[NDArray[Any]]) -> NDArray[np.uint8]:
    """Bytes of arrays, one after another, that only map a file."""
    with path.open("w+b") as file:
        for array in arrays:
            file.write(array.data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint8)


_MeanOf = Callable[[Sequence[Vector], Vector], Vector]


def _plain_mean(updates: Sequence[Vector], spare_d: Vector) -> Vector:
    return weighted_mean(_landing(updates), spare_d)


class _SecureMean:
    """Masked updates, each in a file, and their mean."""

    def __init__(
        self, party: str, updates: Sequence[Vector], folder: Path, allocate: Allocate
    ) -> None:
        """Mask the updates."""
        size, sites = updates[0].size, len(updates)
        clip_norm = 1.01 * max(map(norm, updates))
        key, mask = bytes(32), Mask(key=os.urandom(KEY_BYTES), sign=1)
        ring = RingSpec(bits=32, num_sites=sites, clip_norm=clip_norm)
        plan = next_plan(4, energies_b=np.ones(num_blocks(size)), variance=1.0)
        assert plan is not None  # Of a sum that is not 0.
        digits = Digits(levels=plan.levels, num_sites=sites)
        rotation = Rotation(b"run")
        site = LevelSite(
            plan=plan, digits=digits, rotation=rotation, clip_norm=clip_norm
        )
        self._masks = [replace(mask, sign=-1)] * sites
        self._words, self._sites = list[Words](), sites

        def new_sum() -> MaskedSum | LevelSum:
            if party == RING:
                return MaskedSum(size, ring, allocate=allocate)
            return LevelSum(
                size,
                plan,
                num_sites=sites,
                rotation=rotation,
                clip_norm=clip_norm,
                allocate=allocate,
            )

        self._new_sum = new_sum
        for number, update_d in enumerate(updates):
            copy_d, words_w = update_d.copy(), np.empty(0, np.uint64)
            if party == RING:
                words_w = seal_(
                    copy_d, ring, weight=1.0, masks=[mask], rounding_key=key
                ).words_w
            else:
                left_d = np.zeros(padded(size), np.float32)
                words_w = site.seal_(
                    copy_d, weight=1.0, residual_d=left_d, masks=[mask]
                ).masked_w
            self._words.append(_mapped(folder / f"masked-{number}", [words_w]))

    def of_round(self, _updates: Sequence[Vector], _spare_d: Vector) -> Vector:
        """Open the sum of all."""
        total = self._new_sum()
        for words in self._words:
            is_level = isinstance(total, LevelSum)
            total.fold_(words if is_level else words.view(np.uint32))
        total.apply_masks_(self._masks)
        total.digest()
        return total.decode(divisor=self._sites, weight=self._sites)


def _landing(updates: Sequence[Vector]) -> Iterator[WeightedUpdate]:
    for number, delta_d in enumerate(updates):
        site = SiteId(f"site-{number}")
        yield WeightedUpdate(site=site, delta_d=delta_d, weight=1.0 + number)


def _kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1])


if __name__ == "__main__":
    main()
