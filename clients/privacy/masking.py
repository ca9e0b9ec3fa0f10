"""A site's result of a round, as masked words and a masked header.

One order: weigh, measure, scale to the round's clip norm, then in one pass clip,
round, add noise and mask (``privacy.secagg.arithmetic.seal``).

Shape suffixes: d float values of the model, h words of the header.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from federation.errors import ProtocolError
from federation.messages import MetricSums
from federation.protocols import LocalUpdate, LocalWeights
from federation.vectors import ByteVector, HeaderVector, Vector
from privacy.counts import coarse
from privacy.dp.adaptive_clip import CLIP_RANGE, noisy_bit
from privacy.dp.noise import RingNoise
from privacy.keystream import KEY_BYTES, RandomBytes, apply_masks_
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.arithmetic.header import encode_header
from privacy.secagg.arithmetic.measurement import (
    Measurement,
    measure,
    measure_exactly,
    subtract_,
)
from privacy.secagg.arithmetic.ring import UpdateNotFinite, UpdateOutOfRange
from privacy.secagg.arithmetic.seal import seal_
from privacy.secagg.protocol import train
from privacy.secagg.protocol.key_schedule import RoundMasks

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumNoise:
    """Where a site's share of the noise goes; the contract says how much.

    Attributes:
        spans: Places ``[start, stop)`` of the update that training changes.
        bit_std: Standard deviation of the share on the sum of bits that the clip
            norm follows; None if it is fixed.
    """

    spans: tuple[tuple[int, int], ...]
    bit_std: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedUpdate:
    """An update that is ready to leave.

    Attributes:
        words: Masked words, as bytes.
        weight: What the update was multiplied by.
        is_within: Whether its norm was within the round's clip norm; private.
        clip_factor: What clipping multiplied it by; private.
        norm: Its norm before clipping, where the contract's clip norm is the bound;
            private.
        slots: Further slots of the header; only their sums leave.
    """

    words: ByteVector
    weight: float
    is_within: bool
    clip_factor: float = 1.0
    norm: float = 0.0
    slots: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How one round's answer of one site is masked.

    Attributes:
        contract: What the site accepted.
        masks: The round's; erased by their maker.
        update_clip: What updates are clipped to in this round, in weight units.
        noise: What this site adds, where privacy is made inside the sum.
        random_bytes: The system's source of randomness.
        threads: Threads of the arithmetic.
        share: The part of its weight that the update keeps, in (0, 1]. It is clipped
            before, so that its bound holds.
    """

    contract: Contract
    masks: RoundMasks
    update_clip: float
    noise: SumNoise | None
    random_bytes: RandomBytes
    threads: int
    share: float = 1.0

    @property
    def adds_noise(self) -> bool:
        """Whether noise goes into what is masked: then nothing may leave without it."""
        return self.contract.differential_privacy.ring_noise_std > 0

    def update(
        self, weights_d: Vector, result: LocalWeights | LocalUpdate
    ) -> SealedUpdate:
        """Turn local weights into masked words, in their own memory.

        Args:
            weights_d: The global weights, shape ``(d,)``.
            result: What training gave.

        Raises:
            UpdateNotFinite: The update has no noise to hide in, and is not finite.
            UpdateOutOfRange: The site has more examples than the contract allows,
                or an element exceeds the contract's bound.
            ProtocolError: The contract asks for noise that this site has not planned.
        """
        ring = self.contract.ring()
        weight = self.weight(result)
        update_d, measured = self.measured(weights_d, result)
        sealed = seal_(
            update_d,
            ring,
            weight=weight * self.share,
            masks=train.masks(self.masks.vector),
            rounding_key=self.random_bytes(KEY_BYTES),
            measured=measured,
            noise=self._ring_noise(ring.noise_std),
            threads=self.threads,
        )
        return SealedUpdate(
            words=sealed.words_w.view(np.uint8),
            weight=weight,
            is_within=sealed.clip_factor == 1,
            clip_factor=sealed.clip_factor,
            norm=measured.norm,
        )

    def weight(self, result: LocalWeights | LocalUpdate) -> float:
        """Weight of a site, n / n_max of section 3; 1 where every site counts the same.

        Where rounds may continue without a site, n is on the grid of
        ``privacy.counts``.

        Raises:
            UpdateOutOfRange: The site has more examples than the contract allows.
        """
        contract, num_examples = self.contract, result.num_examples
        if contract.weight_rule == "uniform":
            return 1.0
        if num_examples > contract.max_examples:
            raise UpdateOutOfRange(
                "the site has more examples than the contract's limit of "
                f"{contract.max_examples}"
            )
        if train.counts_coarsely(contract):
            num_examples = min(coarse(num_examples), contract.max_examples)
        return num_examples / contract.max_examples

    def measured(
        self, weights_d: Vector, result: LocalWeights | LocalUpdate
    ) -> tuple[Vector, Measurement]:
        """Take the update out of a result, in its memory, and measure it.

        It is scaled to the contract's clip norm, if the round has another.

        Raises:
            UpdateNotFinite: The update has no noise to hide in, and is not finite.
        """
        if isinstance(result, LocalUpdate):
            update_d, subtrahend_d = result.update_d, None
        else:
            update_d, subtrahend_d = result.weights_d, weights_d
        try:
            return update_d, self._measure(update_d, subtrahend_d)
        except UpdateNotFinite:
            if not self.adds_noise:
                raise
            # To decline would tell, without noise, what became of the training.
            _LOG.warning("training produced NaN or infinity: the update is only noise")
            update_d.fill(0.0)
            return update_d, measure_exactly(update_d)

    def header(
        self,
        sealed: SealedUpdate | None,
        *,
        training: MetricSums | None,
        evaluation: MetricSums | None,
    ) -> HeaderVector:
        """Mask what is reported besides the update; ``sealed`` is None without one."""
        if train.counts_coarsely(self.contract):
            training, evaluation = map(train.coarse_sums, (training, evaluation))
        names = self.contract.header_slots
        values: dict[str, float] = {
            **dict.fromkeys(names, 0),
            **train.write_sums(train.TRAINING, training, names),
            **train.write_sums(train.EVALUATION, evaluation, names),
        }
        if sealed is not None:
            values |= {train.WEIGHT: sealed.weight, **sealed.slots}
            if train.WITHIN_CLIP in names:
                values[train.WITHIN_CLIP] = self._within_clip(
                    is_within=sealed.is_within
                )
        spec = train.header_spec(self.contract.num_sites, names)
        header_h = encode_header(spec, values)
        apply_masks_(header_h, train.masks(self.masks.header))
        return header_h

    def _measure(self, update_d: Vector, subtrahend_d: Vector | None) -> Measurement:
        first = self.contract.clip_norm
        if subtrahend_d is None:
            measured = measure_exactly(update_d)
        else:
            measured = subtract_(update_d, subtrahend_d, threads=self.threads)
        if self.update_clip != first:
            # The ring, and its noise, are made for the contract's clip norm.
            with np.errstate(over="ignore"):
                np.multiply(update_d, first / self.update_clip, out=update_d)
            measured = measure(update_d, threads=self.threads)
        return measured

    def _within_clip(self, *, is_within: bool) -> float:
        """The header's bit about the clip norm, with this site's noise."""
        if self.noise is None or self.noise.bit_std is None:
            raise ProtocolError("has no noise plan for the contract's clipping")
        key = self.random_bytes(KEY_BYTES)
        return noisy_bit(is_within=is_within, std=self.noise.bit_std, key=key)

    def _ring_noise(self, noise_std: float) -> RingNoise | None:
        """This site's share of the noise inside the sum; None if there is none."""
        if not noise_std:
            return None
        if self.noise is None:
            raise ProtocolError("has no noise plan for this contract")
        return RingNoise(
            noise_std=noise_std, spans=self.noise.spans, random_bytes=self.random_bytes
        )


def check_clip(contract: Contract, update_clip: float) -> None:
    """Check that a round's clip norm is the contract's, unless it may adapt.

    Where it adapts, any value is as private, for noise is in proportion to it; but
    scaled beyond float32 an update would be lost.

    Raises:
        ProtocolError: It is another.
    """
    first = contract.clip_norm
    adapts = train.WITHIN_CLIP in contract.header_slots
    reach = CLIP_RANGE if adapts else 1.0
    if not first / reach <= update_clip <= first * reach:
        far = f" by more than a factor of {reach:.0f}" if adapts else ""
        raise ProtocolError(
            f"was asked to clip to {update_clip}, and the contract says {first}: they "
            f"differ{far}"
        )
