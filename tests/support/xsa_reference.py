"""The protocol ``xsa-v2`` once more, slow and plain, sharing no code with the product.

Written from its documentation: bytes and Python integers, primitives from
``plain_crypto`` and ``plain_mlkem``, nothing imported from ``privacy.secagg``. It
plays all parties of a run whose whole entropy is given, and writes down every value
on the way from the contract to the sum. There are no checks: all parties are honest.

``play`` takes the ``inputs`` of a vector in ``tests/vectors/xsa_v2.json`` and gives
its ``trace``; bytes are hexadecimal in both. One file, although it is long: it is
read from top to bottom, beside the specification.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support import plain_crypto, plain_mlkem

Json = dict[str, Any]

# --- Spelling ------------------------------------------------------------------


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def u64(value: int) -> bytes:
    return value.to_bytes(8, "big")


def lp(*parts: bytes | str) -> bytes:
    """LP of each part, one after another; text is UTF-8."""
    data = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"".join(u64(len(part)) + part for part in data)


def numbers(values: Sequence[int]) -> bytes:
    return u64(len(values)) + b"".join(map(u64, values))


def byte_map(entries: Mapping[int, bytes]) -> bytes:
    pairs = [u64(key) + lp(entries[key]) for key in sorted(entries)]
    return u64(len(entries)) + b"".join(pairs)


def real(value: float) -> bytes:
    return struct.pack(">d", value)


def sign(secret: bytes, label: str, body: bytes) -> bytes:
    return plain_crypto.ed25519_sign(secret, lp("xsa-v1 signature", label, body))


def signed(tag: str, label: str, body: bytes, secret: bytes) -> bytes:
    """A message with its tag before what is signed, and the signature after it."""
    return lp(f"xsa-v2/{tag}") + body + lp(sign(secret, label, body))


# --- Setup ---------------------------------------------------------------------


@dataclass
class Site:
    """One site's secrets, and what it derives from them."""

    number: int
    identity: bytes
    mask: bytes
    channel: bytes
    kem_seed: bytes
    nonce: bytes
    encapsulations: Mapping[int, bytes]


@dataclass
class Run:
    """What all parties know, and every party's secrets."""

    terms: Json
    aggregator: bytes
    sites: dict[int, Site]
    contract_hash: bytes = b""
    setup_hash: bytes = b""

    @property
    def job_digest(self) -> bytes:
        return bytes.fromhex(self.terms["job_digest"])

    @property
    def cohort(self) -> list[int]:
        return sorted(self.sites)

    @property
    def dropouts_allowed(self) -> bool:
        return self.terms["threshold"] < len(self.sites)


def read_run(inputs: Json) -> Run:
    sites = {}
    for number, given in enumerate(inputs["sites"], start=1):
        secrets = {k: bytes.fromhex(v) for k, v in given.items() if isinstance(v, str)}
        drawn = given["encapsulations"].items()
        sites[number] = Site(
            number=number,
            encapsulations={int(j): bytes.fromhex(m) for j, m in drawn},
            **secrets,
        )
    return Run(inputs["contract"], bytes.fromhex(inputs["aggregator"]), sites)


def roster_digest(run: Run) -> bytes:
    terms = run.terms
    key = plain_crypto.ed25519_public(run.aggregator)
    data = lp(lp("xsa-v1/roster", u64(terms["roster_serial"])))
    data += lp(lp(terms["aggregator_organisation"], key))
    return sha256(data + b"".join(lp(member) for member in members(run)))


def members(run: Run) -> list[bytes]:
    """Name, organisation and key of each site."""
    return [
        lp(*who, plain_crypto.ed25519_public(site.identity))
        for who, site in zip(run.terms["members"], run.sites.values(), strict=True)
    ]


def privacy_terms(terms: Json) -> bytes:
    names = ("noise_multiplier", "sampling_rate", "delta")
    names += ("epsilon_cap", "clip_norm", "ring_noise_std")
    words = lp(terms["profile"], terms["mechanism"])
    return (
        words
        + u64(terms["steps_per_round"])
        + b"".join(real(terms[name]) for name in names)
    )


_PINS = ("code_hash", "layout_digest", "job_digest")


def contract(run: Run) -> bytes:
    terms = run.terms
    pins = (bytes.fromhex(terms[k]) for k in _PINS)
    slots = terms["header_slots"]
    amplitude = ((1 << terms["ring_bits"] - 1) - 1) // len(run.sites)
    bound = terms["element_bound"] or terms["clip_norm"]
    scale = (amplitude * (1 - 2.0**-12) - 1) / bound
    return b"".join(
        [
            lp("xsa-v2/contract", terms["run_id"], "xsa-v2", *pins),
            u64(terms["num_values"]),
            u64(terms["roster_serial"]),
            lp(roster_digest(run)),
            privacy_terms(terms["differential_privacy"]),
            u64(len(run.sites)),
            *members(run),
            lp(plain_crypto.ed25519_public(run.aggregator)),
            *(u64(terms[k]) for k in ("threshold", "min_sites", "ring_bits")),
            real(terms["clip_norm"]),
            real(terms["element_bound"] or 0.0),
            u64(terms["clip_elements"]),
            real(scale),
            u64(amplitude),
            lp(terms["weight_rule"]),
            u64(terms["max_examples"]),
            u64(terms["max_rounds"]),
            u64(len(slots)),
            lp(*slots),
            u64(terms["hybrid"]),
            u64(terms["two_site_waiver"]),
            lp(b""),  # All sites are in one sum.
            u64(terms["levels"]),
            u64(terms["fragments"]),
        ]
    )


_NINE = bytes([9]) + bytes(31)


def public_keys(run: Run, site: Site) -> tuple[bytes, bytes, bytes]:
    """C_i, E_i and K_i."""
    kem = plain_mlkem.public_key(site.kem_seed) if run.terms["hybrid"] else b""
    mask = plain_crypto.x25519(site.mask, _NINE)
    return mask, plain_crypto.x25519(site.channel, _NINE), kem


def set_up(run: Run, trace: Json) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """S1 and S2; R_ij^(1) and E_ij^(1) as site i has them, for each (i, j)."""
    terms = contract(run)
    run.contract_hash = sha256(terms)
    offer = lp("xsa-v2/offer", terms, sign(run.aggregator, "offer", terms))
    public = {i: public_keys(run, site) for i, site in run.sites.items()}
    adverts = {}
    for i, site in run.sites.items():
        body = lp(run.contract_hash) + u64(i) + lp(*public[i], site.nonce)
        adverts[i] = signed("advert", "advert", body, site.identity)
    run.setup_hash = sha256(lp("xsa-v2/book") + byte_map(adverts))
    kem_secrets, confirms = {}, {}
    for i, site in run.sites.items():
        ciphertexts = {}
        for j in [x for x in run.cohort if x > i and run.terms["hybrid"]]:
            message = site.encapsulations[j]
            made = plain_mlkem.encapsulate(public[j][2], message)
            kem_secrets[i, j], ciphertexts[j] = made
        body = lp(run.setup_hash) + u64(i) + byte_map(ciphertexts)
        confirms[i] = signed("confirm", "confirm", body, site.identity)
    trace["roster_digest"] = roster_digest(run).hex()
    trace["contract"] = terms.hex()
    trace["contract_hash"] = run.contract_hash.hex()
    trace["offer"] = offer.hex()
    trace["adverts"] = in_hex(adverts)
    trace["setup_hash"] = run.setup_hash.hex()
    trace["confirms"] = in_hex(confirms)
    return roots(run, public, kem_secrets)


def roots(
    run: Run,
    public: Mapping[int, tuple[bytes, bytes, bytes]],
    kem_secrets: Mapping[tuple[int, int], bytes],
) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    made = {}
    for i, site in run.sites.items():
        for j in [x for x in run.cohort if x != i]:
            kem = kem_secrets.get((min(i, j), max(i, j)), b"")
            both = [(site.mask, public[j][0]), (site.channel, public[j][1])]
            exchanged = [plain_crypto.x25519(*pair) + kem for pair in both]
            mask, channel = (
                plain_crypto.extract(run.setup_hash, material) for material in exchanged
            )
            made[i, j] = mask, channel
    return made


# --- Rounds --------------------------------------------------------------------


def in_hex(entries: Mapping[Any, bytes]) -> dict[str, str]:
    return {str(key): entries[key].hex() for key in sorted(entries)}


def ratcheted(root: bytes, round_index: int) -> bytes:
    """R^(r) of R^(1)."""
    for following in range(2, round_index + 1):
        root = plain_crypto.expand(root, lp("ratchet") + u64(following))
    return root


def stream(secret: bytes, part: str, context: bytes, size: int, bits: int) -> list[int]:
    """``size`` words of the keystream of a round secret."""
    key = plain_crypto.expand(secret, lp("stream", part) + context)
    width = bits // 8
    data = plain_crypto.ctr_stream(key, width * size)
    return [
        int.from_bytes(data[at : at + width], "little")
        for at in range(0, len(data), width)
    ]


def combined(words: list[int], sign: int, more: list[int], bits: int) -> list[int]:
    pairs = zip(words, more, strict=True)
    return [(word + sign * other) % (1 << bits) for word, other in pairs]


def on_wire(words: list[int], bits: int) -> bytes:
    return b"".join(word.to_bytes(bits // 8, "little") for word in words)


# --- Few levels ----------------------------------------------------------------

BLOCK = 4096


def digits_of_a_word(base: int) -> int:
    """k: as many digits as stay below 2^64."""
    return max(k for k in range(1, 65) if base**k <= 1 << 64)


def places(num_values: int, base: int) -> list[list[list[int]]]:
    """For each group and each of its words: the values of its digits, lowest first."""
    k, padded = digits_of_a_word(base), -(-num_values // BLOCK) * BLOCK
    groups = []
    for begin in range(0, padded, k * BLOCK):
        size = min(k * BLOCK, padded - begin)
        width = -(-size // k)
        words = [list(range(j, size, width)) for j in range(width)]
        groups.append([[begin + value for value in word] for word in words])
    return groups


def packed(digits: Sequence[int], num_values: int, base: int) -> list[int]:
    return [
        sum(digits[value] * base**p for p, value in enumerate(word))
        for group in places(num_values, base)
        for word in group
    ]


def unpacked(words: Sequence[int], num_values: int, base: int) -> bytes:
    """Digits of a sum, one byte each."""
    groups = places(num_values, base)
    found = {}
    for word, values in zip(words, [w for g in groups for w in g], strict=True):
        for p, value in enumerate(values):
            found[value] = word // base**p % base
    return bytes(found[value] for value in sorted(found))


def task_digest(task: Json) -> bytes:
    """task_r, with levels and steps; and with a state that sites begin with."""
    plan = b"xsa-v2/levels" + u64(task["levels"]) + bytes.fromhex(task["steps"])
    settles = [bytes.fromhex(task["certificate"])] if "certificate" in task else []
    asked = lp("xsa-v2/task", task["asked"], *settles)
    return sha256(asked + real(task["update_clip"]) + sha256(plan))


class Round:
    """One round, played by all parties."""

    def __init__(
        self,
        run: Run,
        roots: Mapping[tuple[int, int], tuple[bytes, bytes]],
        given: Json,
    ) -> None:
        self.run, self.given, self.index = run, given, given["index"]
        self.levels = run.terms["levels"]
        self.base = len(run.sites) * (self.levels - 1) + 1
        bits = 64 if self.levels else run.terms["ring_bits"]
        self.widths = {"vector": bits, "header": 64}
        facts = (bytes.fromhex(given["model_digest"]), numbers(run.cohort))
        hashes = (run.contract_hash, run.setup_hash, u64(self.index))
        if self.levels:
            self.task_digest = task_digest(given["task"])
        else:
            self.task_digest = bytes.fromhex(given["task_digest"])
        about = (self.task_digest, run.job_digest)
        self.context = sha256(lp("xsa-v2", *hashes, *facts, *about))
        self.pair_secrets, self.channels = {}, {}
        for (i, j), (mask, channel) in roots.items():
            info = lp("mask") + self.context + u64(min(i, j)) + u64(max(i, j))
            now = ratcheted(mask, self.index)
            self.pair_secrets[i, j] = plain_crypto.expand(now, info)
            now = ratcheted(channel, self.index)
            info = lp("share channel") + self.context + u64(i) + u64(j)
            self.channels[i, j] = plain_crypto.expand(now, info)
        self.self_masks = {
            int(i): bytes.fromhex(b) for i, b in given["self_masks"].items()
        }

    def others(self, i: int) -> list[int]:
        return [j for j in self.run.cohort if j != i]

    def masked(self, i: int, part: str) -> list[int]:
        """y_i, or the masked header."""
        bits, words = self.widths[part], self.words(i, part)
        secrets = [
            (1 if j > i else -1, self.pair_secrets[i, j]) for j in self.others(i)
        ]
        if self.run.dropouts_allowed:
            secrets.append((1, self.self_masks[i]))
        for sign_, secret in secrets:
            more = stream(secret, part, self.context, len(words), bits)
            words = combined(words, sign_, more, bits)
        return words

    def words(self, i: int, part: str) -> list[int]:
        """Those that are masked."""
        given = self.given[f"{part}s"][str(i)]
        if self.levels and part == "vector":
            digits = [int(digit) for digit in given]
            return packed(digits, self.run.terms["num_values"], self.base)
        return [word % (1 << self.widths[part]) for word in given]

    def bundles(self, i: int) -> dict[int, bytes]:
        """For each site, its shares of b_i and of every k_ij, one after another."""
        pool = bytes.fromhex(self.given["coefficients"][str(i)])
        drawn = [
            int.from_bytes(pool[at : at + 48], "big") for at in range(0, len(pool), 48)
        ]
        degree = self.run.terms["threshold"] - 1
        secrets = [
            self.self_masks[i],
            *(self.pair_secrets[i, j] for j in self.others(i)),
        ]
        made = dict.fromkeys(self.run.cohort, b"")
        for at, secret in enumerate(secrets):
            higher = drawn[degree * at : degree * (at + 1)][::-1]
            for holder in made:
                made[holder] += plain_crypto.share(secret, higher, holder)
        return made

    def sealed(self, i: int) -> dict[int, bytes]:
        if not self.run.dropouts_allowed:
            return {}
        bundles = self.bundles(i)
        return {
            j: plain_crypto.gcm_seal(
                self.channels[i, j], bytes(12), bundles[j], self.associated(i, j)
            )
            for j in self.others(i)
        }

    def rows(self, i: int) -> dict[int, bytes]:
        """Commitments of i: for each holder one row; holder 0 has the secrets."""
        if not self.run.dropouts_allowed:
            return {}
        about = [i, *self.others(i)]
        secrets = [self.self_masks[i], *(self.pair_secrets[i, j] for j in about[1:])]
        values = {0: [bytes(1) + secret for secret in secrets]}
        for x, bundle in self.bundles(i).items():
            values[x] = [bundle[at : at + 33] for at in range(0, len(bundle), 33)]
        return {
            x: b"".join(
                sha256(
                    lp("xsa-v2/share", self.context) + u64(i) + u64(x) + u64(at) + lp(v)
                )
                for at, v in zip(about, listed, strict=True)
            )
            for x, listed in values.items()
        }

    def associated(self, i: int, j: int) -> bytes:
        return self.context + u64(i) + u64(j)

    def head(self, i: int, sealed: Mapping[int, bytes]) -> bytes:
        digests = [
            sha256(on_wire(self.masked(i, part), bits))
            for part, bits in self.widths.items()
        ]
        rows = self.rows(i)
        dealt = [sha256(lp(sealed.get(x, b""), rows[x])) for x in sorted(rows)]
        body = u64(i) + lp(self.context, *digests, b"".join(dealt))
        return signed("head", "masked head", body, self.run.sites[i].identity)

    def play(self) -> Json:
        """R1 to R3; the trace of the round."""
        answering = [i for i in self.run.cohort if i not in self.given["declines"]]
        sealed = {i: self.sealed(i) for i in answering}
        heads = {i: self.head(i, sealed[i]) for i in answering}
        answers = {
            i: lp("xsa-v2/masked", head) + byte_map(sealed[i]) + byte_map(self.rows(i))
            for i, head in heads.items()
        }
        trace = {
            "context": self.context.hex(),
            "pair_secrets": {
                f"{i}-{j}": secret.hex()
                for (i, j), secret in self.pair_secrets.items()
                if i < j
            },
            "masked_vectors": self._in_words("vector", answering),
            "masked_headers": self._in_words("header", answering),
            "declines": in_hex({i: self.decline(i) for i in self.given["declines"]}),
            "answers": in_hex(answers),
        }
        alive = [i for i in answering if i not in self.given["silent"]]
        opened: Json = {}
        if self.run.dropouts_allowed:
            opened = self.reveal(alive, heads, sealed)
        sums: Json = {f"{part}_sum": self.sum(part, alive) for part in self.widths}
        certificate = self.certificate(alive, sums)
        if self.levels:
            words = [word % (1 << 64) for word in sums["vector_sum"]]
            found = unpacked(words, self.run.terms["num_values"], self.base)
            sums["vector_sum"] = found.hex()
            sums |= {
                "task_digest": self.task_digest.hex(),
                "next_body": self.body(certificate).hex(),
            }
        return trace | opened | sums | {"certificate": certificate.hex()}

    def body(self, certificate: bytes) -> bytes:
        """What goes with the model, or with a sum, to a site that has the confirms."""
        task = self.given["task"]
        head = lp("xsa-v2/train", self.run.setup_hash, b"", certificate)
        plan = u64(task["levels"]) + lp(bytes.fromhex(task["steps"]))
        return head + real(task["update_clip"]) + plan + real(task["divisor"])

    def decline(self, i: int) -> bytes:
        body = u64(i) + lp(self.context)
        return signed("decline", "decline", body, self.run.sites[i].identity)

    def certificate(self, alive: list[int], sums: Json) -> bytes:
        """End of the round; a sum's words have 2 bytes at 16 bits, 8 at 64, else 4."""
        modulus = 1 << self.widths["vector"]
        width = {16: 16, 64: 64}.get(self.widths["vector"], 32)
        words = [value % modulus for value in sums["vector_sum"]]
        header = [value % (1 << 64) for value in sums["header_sum"]]
        digests = [sha256(on_wire(words, width)), sha256(on_wire(header, 64))]
        following = bytes.fromhex(self.given["next_model_digest"])
        body = u64(self.index) + lp(self.context) + numbers(alive)
        body += lp(*digests, following)
        return signed("certificate", "certificate", body, self.run.aggregator)

    def _in_words(self, part: str, answering: list[int]) -> dict[str, str]:
        words = {i: self.masked(i, part) for i in answering}
        return in_hex({i: on_wire(w, self.widths[part]) for i, w in words.items()})

    def reveal(
        self,
        alive: list[int],
        heads: Mapping[int, bytes],
        sealed: Mapping[int, Mapping[int, bytes]],
    ) -> Json:
        """R2 and R3."""
        identity = {i: self.run.sites[i].identity for i in alive}
        survivors = lp("xsa-v2/survivors") + byte_map({i: heads[i] for i in alive})
        consents = {}
        for i in [x for x in alive if x not in self.given["no_consent"]]:
            body = u64(i) + lp(self.context) + numbers(alive)
            consents[i] = signed("consent", "survivors", body, identity[i])
        reveals, shares = {}, {}
        self.shares: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}
        for i in [x for x in consents if x not in self.given["no_shares"]]:
            inbox = byte_map({j: sealed[j][i] for j in alive if j != i})
            rows = byte_map({j: self.rows(j)[i] for j in alive if j != i})
            reveals[i] = lp("xsa-v2/reveal") + byte_map(consents) + inbox + rows
            self.shares[i] = self.released(i, alive)
            maps = [byte_map(pieces) for pieces in self.shares[i]]
            body = u64(i) + lp(self.context) + b"".join(maps) + numbers([])
            shares[i] = signed("shares", "shares", body, identity[i])
        return {
            "survivors": survivors.hex(),
            "consents": in_hex(consents),
            "reveals": in_hex(reveals),
            "shares": in_hex(shares),
        }

    def released(
        self, i: int, alive: list[int]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Shares of b_j for j in A; and of k_jl for j in A, for each l not in A."""
        own, pairs = {}, {}
        for j in alive:
            bundle = self.bundles(j)[i]
            pieces = [bundle[at : at + 33] for at in range(0, len(bundle), 33)]
            own[j] = pieces[0]
            of_peer = dict(zip(self.others(j), pieces[1:], strict=True))
            pairs[j] = b"".join(of_peer[x] for x in self.others(j) if x not in alive)
        return own, pairs

    def sum(self, part: str, alive: list[int]) -> list[int]:
        """The survivors' sum, out of masked words and restored secrets alone."""
        bits, size = self.widths[part], len(self.words(1, part))
        total = [0] * size
        for i in alive:
            total = combined(total, 1, self.masked(i, part), bits)
        for sign_, secret in self.corrections(alive):
            more = stream(secret, part, self.context, size, bits)
            total = combined(total, sign_, more, bits)
        half = 1 << bits - 1
        return [word - (1 << bits) if word >= half else word for word in total]

    def corrections(self, alive: list[int]) -> list[tuple[int, bytes]]:
        if not self.run.dropouts_allowed:
            return []
        holders = sorted(self.shares)[: self.run.terms["threshold"]]
        found = []
        for j in alive:
            own = {i: self.shares[i][0][j] for i in holders}
            found.append((-1, plain_crypto.restore(own)))
            absent = [x for x in self.run.cohort if x not in alive]
            for at, x in enumerate(absent):
                piece = slice(33 * at, 33 * at + 33)
                pair = {i: self.shares[i][1][j][piece] for i in holders}
                found.append((-1 if x > j else 1, plain_crypto.restore(pair)))
        return found


def play(inputs: Json) -> Json:
    """The trace of a whole run."""
    run = read_run(inputs)
    trace: Json = {}
    roots_ = set_up(run, trace)
    trace["rounds"] = [Round(run, roots_, given).play() for given in inputs["rounds"]]
    return trace
