"""The product's own state machines, played on the inputs of a frozen run."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from support import plain_mlkem, toy
from support.xsa_inputs import NUM_VALUES, PADDED, SLOTS

from federation.ids import RunId, SiteId
from federation.messages import TaskKind
from privacy import keystream as prg
from privacy.keystream import Mask
from privacy.secagg.agreement import identity
from privacy.secagg.agreement.certificate import certify
from privacy.secagg.agreement.contract import Contract, members_of
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.policy import LocalPolicy
from privacy.secagg.agreement.roster import Roster, RosterEntry
from privacy.secagg.agreement.terms import PrivacyTerms
from privacy.secagg.arithmetic.accumulator import MaskedSum
from privacy.secagg.arithmetic.digits import Digits
from privacy.secagg.arithmetic.level_sum import LevelSum, rotation_of
from privacy.secagg.arithmetic.levels import LevelPlan
from privacy.secagg.arithmetic.ring import RingSpec
from privacy.secagg.protocol import key_schedule as keys, setup, train
from privacy.secagg.protocol.client import SiteSession
from privacy.secagg.protocol.key_schedule import RoundFacts, RoundMasks, RunSecrets
from privacy.secagg.protocol.messages import Book
from privacy.secagg.protocol.round_memory import InMemoryRounds
from privacy.secagg.protocol.server import AggregatorRound
from privacy.secagg.protocol.setup import AggregatorSetup, SetupRecord, SiteSetup

Json = dict[str, Any]

_DTYPES = {16: np.uint16, 24: np.uint8, 32: np.uint32}
_Sum = MaskedSum | LevelSum


def _hexed(entries: dict[int, bytes]) -> dict[str, str]:
    return {str(key): entries[key].hex() for key in sorted(entries)}


class _Draws:
    """Gives the listed bytes, each to a call that asks for just as many."""

    def __init__(self, draws: Iterable[bytes]) -> None:
        self._left = list(draws)

    def __call__(self, count: int) -> bytes:
        drawn = self._left.pop(0)
        assert len(drawn) == count
        return drawn


class _Product:
    """A run of the product's own state machines on the inputs of a vector."""

    def __init__(self, inputs: Json) -> None:
        self.inputs, self.terms = inputs, inputs["contract"]
        self.aggregator = self._identity(inputs["aggregator"])
        names = [SiteId(site) for site, _ in self.terms["members"]]
        self.identities = {
            i: self._identity(site["identity"])
            for i, site in enumerate(inputs["sites"], start=1)
        }
        self.names = dict(zip(self.identities, names, strict=True))
        self.roster = Roster(
            serial=self.terms["roster_serial"],
            aggregator_organisation=self.terms["aggregator_organisation"],
            aggregator_key=self.aggregator.public.key,
            sites=tuple(
                RosterEntry(
                    site=self.names[i],
                    organisation=self.terms["members"][i - 1][1],
                    public_key=own.public.key,
                )
                for i, own in self.identities.items()
            ),
        )
        self.contract = self._contract()

    @staticmethod
    def _identity(secret: str) -> Identity:
        return identity.generate(_Draws([bytes.fromhex(secret)]))

    def _contract(self) -> Contract:
        same = ("num_values", "roster_serial", "threshold", "min_sites", "ring_bits")
        same += ("clip_norm", "element_bound", "clip_elements", "weight_rule")
        same += ("max_examples", "max_rounds", "hybrid", "two_site_waiver", "levels")
        same += ("fragments",)
        ring = RingSpec(
            bits=self.terms["ring_bits"],
            num_sites=len(self.names),
            clip_norm=self.terms["clip_norm"],
            element_bound=self.terms["element_bound"],
            clip_elements=self.terms["clip_elements"],
        )
        return Contract(
            run_id=RunId(self.terms["run_id"]),
            code_hash=bytes.fromhex(self.terms["code_hash"]),
            layout_digest=bytes.fromhex(self.terms["layout_digest"]),
            job_digest=bytes.fromhex(self.terms["job_digest"]),
            roster_digest=self.roster.digest,
            members=members_of(self.roster),
            aggregator_key=self.aggregator.public.key,
            header_slots=tuple(self.terms["header_slots"]),
            scale=ring.scale,
            amplitude=ring.amplitude,
            differential_privacy=PrivacyTerms(**self.terms["differential_privacy"]),
            **{name: self.terms[name] for name in same},
        )

    def _site_setup(self, number: int) -> SiteSetup:
        given = self.inputs["sites"][number - 1]
        draws = ["mask", "channel", *["kem_seed"] * self.contract.hybrid, "nonce"]
        policy = LocalPolicy(
            roster=self.roster,
            run_id=self.contract.run_id,
            job_digest=self.contract.job_digest,
            code_hashes=frozenset({self.contract.code_hash}),
            layout_digest=self.contract.layout_digest,
            num_values=self.contract.num_values,
            min_sites=self.contract.min_sites,
            max_clip_norm=self.contract.clip_norm,
            max_rounds=self.contract.max_rounds,
            header_slots=SLOTS,
            require_hybrid=False,
            accept_two_sites=True,
        )
        return SiteSetup(
            identity=self.identities[number],
            site=self.names[number],
            policy=policy,
            random_bytes=_Draws(bytes.fromhex(given[name]) for name in draws),
        )

    def _confirm(self, number: int, site: SiteSetup, book: bytes) -> bytes:
        given = self.inputs["sites"][number - 1]["encapsulations"]
        adverts = Book.from_bytes(book).adverts
        messages = {
            setup.Advert.from_bytes(adverts[int(j)]).keys.kem: bytes.fromhex(message)  # type: ignore[attr-defined]
            for j, message in given.items()
        }

        def encapsulate(peer_key: bytes) -> tuple[bytes, bytes]:
            return plain_mlkem.encapsulate(peer_key, messages[peer_key])

        # The library draws an encapsulation's randomness itself and takes none.
        with mock.patch.object(setup, "encapsulate", encapsulate):
            return site.on_book(book)

    def set_up(self) -> tuple[SetupRecord, dict[int, RunSecrets], Json]:
        """S1 and S2."""
        aggregator = AggregatorSetup(identity=self.aggregator, contract=self.contract)
        sites = {i: self._site_setup(i) for i in self.identities}
        adverts = {i: site.on_offer(aggregator.offer()) for i, site in sites.items()}
        for data in adverts.values():
            aggregator.on_advert(data)
        book = aggregator.book()
        confirms = {i: self._confirm(i, site, book) for i, site in sites.items()}
        for data in confirms.values():
            aggregator.on_confirm(data)
        record = aggregator.result()
        secrets = {i: site.on_confirms(record.confirms) for i, site in sites.items()}
        trace = {
            "roster_digest": self.roster.digest.hex(),
            "contract": self.contract.to_bytes().hex(),
            "contract_hash": self.contract.digest.hex(),
            "offer": aggregator.offer().hex(),
            "adverts": _hexed(adverts),
            "setup_hash": record.setup_hash.hex(),
            "confirms": _hexed(confirms),
        }
        return record, secrets, trace

    def session(self, number: int, secrets: RunSecrets) -> SiteSession:
        """A site that draws, in every round, what the inputs say."""
        size = 48 * (self.contract.threshold - 1)
        draws = []
        for given in self.inputs["rounds"]:
            pool = bytes.fromhex(given["coefficients"][str(number)])
            draws.append(bytes.fromhex(given["self_masks"][str(number)]))
            draws += [pool[at : at + size] for at in range(0, len(pool), size)]
        return SiteSession(
            contract=self.contract,
            identity=self.identities[number],
            secrets=secrets,
            memory=InMemoryRounds(),
            random_bytes=_Draws(draws),
        )


def _apply_(words: np.ndarray, masks: RoundMasks, part: str) -> np.ndarray:
    streams = getattr(masks, part)
    prg.apply_masks_(words, [Mask(key=s.key, sign=s.sign) for s in streams])
    return words


def _words(values: list[int], bits: int) -> np.ndarray:
    """Integers as words on the wire."""
    if bits == 64:
        return np.array(values, np.int64).view(np.uint64)
    width = bits // 8
    data = b"".join((v % (1 << bits)).to_bytes(width, "little") for v in values)
    return np.frombuffer(bytearray(data), _DTYPES[bits])


def _plan(given: Json) -> LevelPlan:
    steps_b = np.frombuffer(bytes.fromhex(given["task"]["steps"]), "<f4")
    return LevelPlan(levels=given["task"]["levels"], steps_b=steps_b)


def _task_digest(given: Json) -> bytes:
    """Digest of a round's task, which only a plan is given in parts for."""
    if "task" not in given:
        return bytes.fromhex(given["task_digest"])
    kind, evaluate, after, *named = given["task"]["asked"].split()
    task = toy.task(
        kind=TaskKind(kind), evaluate=evaluate == "1", evaluate_after=after == "1"
    )
    if named:
        _, counted, _, index, context = named
        state = {"state_round": int(index), "state_context": context}
        task = replace(task, counted=int(counted), **state)
    certificate = bytes.fromhex(given["task"].get("certificate", ""))
    return train.task_digest(task, _body(given, bytes(32), certificate))


def _body(given: Json, setup_hash: bytes, certificate: bytes) -> train.TrainBody:
    return train.TrainBody(
        setup_hash=setup_hash,
        confirms=b"",
        certificate=certificate,
        update_clip=given["task"]["update_clip"],
        plan=_plan(given),
        divisor=given["task"]["divisor"],
    )


def _empty_sum(product: _Product, given: Json) -> _Sum:
    contract = product.contract
    if not contract.levels:
        return MaskedSum(NUM_VALUES, contract.ring())
    return LevelSum(
        NUM_VALUES,
        _plan(given),
        num_sites=contract.num_sites,
        rotation=rotation_of(contract.run_id),
        clip_norm=contract.clip_norm,
    )


def _vector(product: _Product, values: Any) -> np.ndarray:
    """A site's words before masks."""
    contract = product.contract
    if not contract.levels:
        return _words(values, contract.ring_bits)
    digits = Digits(levels=contract.levels, num_sites=contract.num_sites)
    words = np.empty(digits.num_words(NUM_VALUES), np.uint64)
    (group,) = digits.groups(NUM_VALUES)
    digits.pack(np.array([int(d) for d in values], np.float32), words)
    assert (group.end, group.last) == (PADDED, words.size)
    return words


def _vector_sum(product: _Product, total: _Sum) -> Any:
    contract = product.contract
    if isinstance(total, LevelSum):
        digits = Digits(levels=contract.levels, num_sites=contract.num_sites)
        found = np.empty(PADDED, np.float32)
        digits.unpack(total.words_w, found)
        return found.astype(np.uint8).tobytes().hex()
    half = 1 << (contract.ring_bits - 1)
    sums = [int(word) % (2 * half) for word in total._sum_d]
    return [s - 2 * half if s >= half else s for s in sums]


def _facts(product: _Product, given: Json) -> RoundFacts:
    return RoundFacts(
        round_index=given["index"],
        cohort=product.contract.cohort,
        model_digest=bytes.fromhex(given["model_digest"]),
        task_digest=_task_digest(given),
    )


def _play_round(
    product: _Product,
    sessions: dict[int, SiteSession],
    record: SetupRecord,
    given: Json,
) -> Json:
    facts = _facts(product, given)
    server = AggregatorRound(setup=record, facts=facts)
    total, header = _empty_sum(product, given), np.zeros(len(SLOTS), np.uint64)
    vectors, headers, answers, declines = {}, {}, {}, {}
    for i, session in sessions.items():
        masks = session.begin_round(facts)
        if i in given["declines"]:
            declines[i] = session.decline()
            server.on_decline(declines[i])
            continue
        vector = _apply_(_vector(product, given["vectors"][str(i)]), masks, "vector")
        head = _apply_(_words(given["headers"][str(i)], 64), masks, "header")
        vectors[i], headers[i] = vector.tobytes(), head.tobytes()
        digests = {
            "vector_digest": hashlib.sha256(vectors[i]).digest(),
            "header_digest": hashlib.sha256(headers[i]).digest(),
        }
        answers[i] = session.finish_masked(**digests)
        if i not in given["silent"]:
            server.on_masked(answers[i], **digests)
            total.fold_(vector.view(np.uint8) if product.contract.levels else vector)
            header += head
    server.close_masked()
    trace = {
        "masked_vectors": _hexed(vectors),
        "masked_headers": _hexed(headers),
        "answers": _hexed(answers),
        "declines": _hexed(declines),
    }
    if product.contract.setting == "P2":
        trace |= _reveal(server, sessions, product.names, given)
    corrections = server.corrections()
    total.apply_masks_([Mask(key=s.key, sign=s.sign) for s in corrections.vector])
    header = _apply_(header, corrections, "header")
    opened = server.opened(
        sum_digest=total.digest(),
        header_digest=hashlib.sha256(header.astype("<u8")).digest(),
    )
    following = bytes.fromhex(given["next_model_digest"])
    certificate = certify(opened, following, product.aggregator)
    if product.contract.levels:
        body = _body(given, record.setup_hash, certificate)
        trace["task_digest"] = facts.task_digest.hex()
        trace["next_body"] = train.write_train(body).hex()
    return trace | {
        "vector_sum": _vector_sum(product, total),
        "header_sum": header.view(np.int64).tolist(),
        "certificate": certificate.hex(),
    }


def _reveal(
    server: AggregatorRound,
    sessions: dict[int, SiteSession],
    names: dict[int, SiteId],
    given: Json,
) -> Json:
    survivors = server.survivors()
    lost = given["declines"] + given["silent"] + given["no_consent"]
    alive = [i for i in sessions if i not in lost]
    consents = {i: sessions[i].on_survivors(survivors) for i in alive}
    for data in consents.values():
        server.on_consent(data)
    server.close_consents()
    alive = [i for i in alive if i not in given["no_shares"]]
    reveals = {i: server.reveal(names[i]) for i in alive}
    shares = {i: sessions[i].on_reveal(data) for i, data in reveals.items()}
    for data in shares.values():
        server.on_shares(data)
    return {
        "survivors": survivors.hex(),
        "consents": _hexed(consents),
        "reveals": _hexed(reveals),
        "shares": _hexed(shares),
    }


def _pair_secrets(product: _Product, given: Json) -> Json:
    """ctx_r and every k_ij: of a second setup, since a session gives them to nobody."""
    record, secrets, _ = product.set_up()
    facts = _facts(product, given)
    context = keys.round_context(
        facts,
        contract_hash=product.contract.digest,
        setup_hash=record.setup_hash,
        job_digest=product.contract.job_digest,
    )
    found = {}
    for i, own in secrets.items():
        for j in [x for x in own.roots if x > i]:
            ends = [
                secrets[a].roots[b].take_round(given["index"], context).mask.buffer
                for a, b in ((i, j), (j, i))
            ]
            assert ends[0] == ends[1]
            found[f"{i}-{j}"] = ends[0].hex()
    return {"context": context.hex(), "pair_secrets": found}


def product_trace(inputs: Json) -> Json:
    """What the product makes of the inputs of a vector."""
    product = _Product(inputs)
    record, secrets, trace = product.set_up()
    sessions = {i: product.session(i, own) for i, own in secrets.items()}
    rounds = [
        _pair_secrets(product, given) | _play_round(product, sessions, record, given)
        for given in inputs["rounds"]
    ]
    return trace | {"rounds": rounds}
