"""Bytes of every message of a run under a contract, in which all sites answer.

Each message is written with zeros for its keys, digests, shares and signatures: their
lengths are fixed, so the sizes are exact.
"""

from collections.abc import Callable
from dataclasses import replace

from federation.compression.fragments import Fragment
from federation.ids import SiteId
from federation.messages import SecureStep
from federation.rounds.traffic import SecureSizes, StepSizes
from privacy.secagg.agreement.certificate import (
    Certificate,
    OpenedRound,
    before_rounds,
)
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.agreement.identity import SIGNATURE_BYTES
from privacy.secagg.agreement.message import DIGEST_BYTES
from privacy.secagg.arithmetic.digits import WORD_BYTES
from privacy.secagg.arithmetic.levels import LevelPlan, first_plan
from privacy.secagg.arithmetic.shamir import SHARE_BYTES
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import (
    KEM_CIPHERTEXT_BYTES,
    KEM_PUBLIC_BYTES,
    TAG_BYTES,
    X25519_BYTES,
    PublicRunKeys,
)
from privacy.secagg.protocol.messages import (
    NONCE_BYTES,
    Advert,
    Book,
    Confirm,
    Confirms,
    Consent,
    Head,
    MaskedAnswer,
    Offer,
    RelayedHead,
    Reveal,
    Shares,
    Survivors,
)

_DIGEST, _SIGNATURE = bytes(DIGEST_BYTES), bytes(SIGNATURE_BYTES)
_SHARE = bytes(SHARE_BYTES)


def sizes(contract: Contract, *, by_capacity: bool = False) -> SecureSizes:
    """Bytes of the messages of a run in which all sites of the contract answer.

    Args:
        contract: What all have agreed on.
        by_capacity: Whether tasks show how many steps each site takes.
    """
    cohort = contract.cohort
    dropouts = contract.setting is Setting.P2
    confirms = {i: _confirm(contract, i) for i in cohort}
    bundle = bytes(SHARE_BYTES * len(cohort) + TAG_BYTES)
    row = bytes(DIGEST_BYTES * len(cohort))
    dealt = bytes(DIGEST_BYTES * (len(cohort) + 1)) if dropouts else b""
    head = Head(
        number=1,
        context=_DIGEST,
        vector_digest=_DIGEST,
        header_digest=_DIGEST,
        dealt=dealt,
        signature=_SIGNATURE,
    ).to_bytes()
    others = dict.fromkeys(cohort[1:], bundle)
    masked = MaskedAnswer(
        head=head,
        sealed=others if dropouts else {},
        rows=dict.fromkeys((0, *cohort), row) if dropouts else {},
    )
    fragments = [Fragment(i, contract.fragments) for i in range(contract.fragments)]
    plans = [_plan(contract, fragment) for fragment in fragments]
    steps = (1,) * len(cohort) if by_capacity else ()
    all_confirms = Confirms(confirms=confirms).to_bytes()
    return SecureSizes(
        setup=_setup(contract, confirms),
        opening=_opening(contract, head, bundle, row) if dropouts else {},
        first_task=len(
            _train_body(before_rounds(_DIGEST), all_confirms, plans[0], steps)
        ),
        next_tasks=tuple(
            len(_train_body(_opened(cohort), b"", plan, steps)) for plan in plans
        ),
        last_task=len(_train_body(_opened(cohort), b"", None)),
        answer=len(masked.to_bytes()),
        header_words=len(contract.header_slots),
        relayed={relay.name: _relayed(relay.name) for relay in contract.relays},
        first_updates=tuple(
            update_bytes(contract, plan, fragment)
            for plan, fragment in zip(plans, fragments, strict=True)
        ),
        next_updates=tuple(
            update_bytes(contract, plan and replace(plan, levels=contract.levels), f)
            for plan, f in zip(plans, fragments, strict=True)
        ),
    )


def _relayed(name: SiteId) -> int:
    head = RelayedHead(
        relay=name,
        heads_digest=_DIGEST,
        vector_digest=_DIGEST,
        header_digest=_DIGEST,
        signature=_SIGNATURE,
    )
    return len(head.to_bytes())


def _plan(contract: Contract, fragment: Fragment) -> LevelPlan | None:
    """The plan of a fragment's first round; later ones have as many steps."""
    if not contract.levels:
        return None
    return first_plan(
        fragment.size(contract.num_values),
        num_sites=contract.num_sites,
        clip_norm=contract.clip_norm,
    )


def update_bytes(contract: Contract, plan: LevelPlan | None, fragment: Fragment) -> int:
    """Bytes of the masked words of one site's update in a round."""
    if plan is None:
        return contract.num_values * contract.ring().word_bytes
    size = fragment.size(contract.num_values)
    return WORD_BYTES * plan.digits(contract.num_sites).num_words(size)


def _setup(contract: Contract, confirms: dict[int, bytes]) -> StepSizes:
    kem = bytes(KEM_PUBLIC_BYTES if contract.hybrid else 0)
    key = bytes(X25519_BYTES)
    offer = len(Offer(contract=contract.to_bytes(), signature=_SIGNATURE).to_bytes())
    advert = Advert(
        contract_hash=_DIGEST,
        number=1,
        keys=PublicRunKeys(mask=key, channel=key, kem=kem),
        nonce=bytes(NONCE_BYTES),
        signature=_SIGNATURE,
    ).to_bytes()
    book = len(Book(adverts=dict.fromkeys(contract.cohort, advert)).to_bytes())
    return {
        SecureStep.ADVERTISE: _by_site(contract, lambda _: (offer, len(advert))),
        SecureStep.CONFIRM: _by_site(contract, lambda i: (book, len(confirms[i]))),
    }


def _opening(contract: Contract, head: bytes, bundle: bytes, row: bytes) -> StepSizes:
    cohort = contract.cohort
    survivors = len(Survivors(heads=dict.fromkeys(cohort, head)).to_bytes())
    consent = Consent(
        number=1, context=_DIGEST, survivors=cohort, signature=_SIGNATURE
    ).to_bytes()
    reveal = Reveal(
        consents=dict.fromkeys(cohort, consent),
        inbox=dict.fromkeys(cohort[1:], bundle),
        rows=dict.fromkeys(cohort[1:], row),
    ).to_bytes()
    shares = Shares(
        number=1,
        context=_DIGEST,
        self_shares=dict.fromkeys(cohort, _SHARE),
        pair_shares=dict.fromkeys(cohort, b""),
        signature=_SIGNATURE,
    ).to_bytes()
    return {
        SecureStep.SURVIVORS: _by_site(contract, lambda _: (survivors, len(consent))),
        SecureStep.REVEAL: _by_site(contract, lambda _: (len(reveal), len(shares))),
    }


def _by_site(
    contract: Contract, sizes_of: Callable[[int], tuple[int, int]]
) -> dict[SiteId, tuple[int, int]]:
    return {member.site: sizes_of(member.number) for member in contract.members}


def _confirm(contract: Contract, number: int) -> bytes:
    above = [i for i in contract.cohort if i > number and contract.hybrid]
    return Confirm(
        setup_hash=_DIGEST,
        number=number,
        ciphertexts=dict.fromkeys(above, bytes(KEM_CIPHERTEXT_BYTES)),
        signature=_SIGNATURE,
    ).to_bytes()


def _opened(cohort: tuple[int, ...]) -> OpenedRound:
    return replace(before_rounds(_DIGEST), round_index=1, survivors=cohort)


def _train_body(
    opened: OpenedRound,
    confirms: bytes,
    plan: LevelPlan | None,
    steps_by_site: tuple[int, ...] = (),
) -> bytes:
    certificate = Certificate(
        opened=opened, model_digest=_DIGEST, signature=_SIGNATURE
    ).to_bytes()
    return train.write_train(
        train.TrainBody(
            setup_hash=_DIGEST,
            confirms=confirms,
            certificate=certificate,
            update_clip=1.0,
            plan=plan,
            steps_by_site=steps_by_site,
        )
    )
