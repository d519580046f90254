r"""Compressors by name with arguments, for ``--compress`` and ``jaxpfl.fit(compress=)``.

- ``lossless``: the numbers unchanged, the baseline of the others.
- ``qsgd:levels=4``: random rounding to ``levels`` levels of the norm, in the Elias code; unbiased.
- ``top-k:share=0.01``: that share of the entries, the largest in magnitude; at least one.
- ``sign``: the sign of each entry, and a common scale.
- ``uniform:bits=4``: random rounding to 2^bits levels; unbiased.
- ``tv:gamma=0.1``: the total-variation update (`total_variation`), in the run-length code. Gamma has the units of a
  client's increment and therefore no default; it decays as :math:`\gamma / \sqrt{t + 1}` with the finished rounds t, or
  is constant with ``decay=false``. ``codebook=3`` also quantises the update to a codebook of three numbers.
- ``codebook:size=3``: a codebook of the entries themselves, in the run-length code.

Each of them also takes ``feedback=true`` or ``false``: error feedback, which adds the error of a message to the
client's next one (`uploads`). It is the default for biased compressors. Unbiased ones need no correction, and
their error may exceed the vector itself, :math:`E \|Q(x) - x\|^2 \le \omega \|x\|^2` with omega above one, so that the
memory would grow without bound. With feedback they therefore send :math:`Q(x) / (1 + \omega)`, whose error is at most
:math:`\omega / (1 + \omega) < 1` of the squared norm (Beznosikov et al. 2020, "On Biased Compression for Distributed
Learning").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from jaxpfl.core import checks, choices
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.uploads.compression import quantizers, total_variation
from jaxpfl.uploads.compression.quantizers import Compressed

Compress: TypeAlias = Callable[[Key, Scalar, Array], Compressed]
"""``(key, round, x [d]) -> Compressed``; rounds count from 0. Pure; the result is not finite if x is not."""


class Compressor(NamedTuple):
    """A compressor of vectors.

    Attributes:
      compress: the compression itself.
      feedback: whether to use error feedback; None for the default of the compressor.
      omega: ``d -> omega`` of an unbiased compressor, with ``E |C(x) - x|^2 <= omega |x|^2``. None for a compressor
        whose message is never further from x than zero is.
    """

    compress: Compress
    feedback: bool | None = None
    omega: Callable[[int], float] | None = None

    @property
    def feeds_back(self) -> bool:
        """True if error feedback is used: ``feedback``, or by default unless the compressor is unbiased."""
        return self.omega is None if self.feedback is None else self.feedback

    def fed_back(self, key: Key, round: Scalar, x: Array) -> Compressed:
        """Compressed x under error feedback: on average nearer to x than zero is."""
        sent = self.compress(key, round, x)
        return sent if self.omega is None else sent._replace(value=sent.value / (1 + self.omega(x.shape[0])))


def resolve(compressor: str | Compressor) -> Compressor:
    """The compressor of that name with those arguments; a `Compressor` is returned as it is.

    Examples:
      >>> resolve("top-k:share=0.05,feedback=false").feeds_back
      False

    Raises:
      JaxpflError: if the name or an argument is unknown, an argument is missing, or a value is out of range.
    """
    if not isinstance(compressor, str):
        return compressor
    name, values = choices.arguments("compressor", compressor, COMPRESSORS, feedback=bool)
    feedback = values.pop("feedback", None)
    return COMPRESSORS[name](**values)._replace(feedback=feedback)


def _lossless() -> Compressor:
    return Compressor(
        lambda key, round, x: Compressed(x, jnp.int32(8 * x.dtype.itemsize * x.shape[0])),
        omega=lambda d: 0.0,  # nothing is left out that a memory could keep
    )


def _qsgd(levels: int = 4) -> Compressor:
    checks.count("qsgd:levels", levels)
    return Compressor(
        lambda key, round, x: quantizers.qsgd(key, x, levels),
        omega=lambda d: min(d / levels**2, math.sqrt(d) / levels),
    )


def _top_k(share: float = 0.01) -> Compressor:
    checks.rate("top-k:share", share)
    return Compressor(lambda key, round, x: quantizers.top_k(x, max(1, int(share * x.shape[0] + 0.5))))


def _sign() -> Compressor:
    return Compressor(lambda key, round, x: quantizers.sign(x))


def _uniform(bits: int = 4) -> Compressor:
    quantizers.check_bits(bits)
    return Compressor(
        lambda key, round, x: quantizers.uniform(key, x, bits),
        omega=lambda d: d * (2**bits - 1) ** -2,  # the largest entry is at most the norm
    )


def _tv(gamma: float, decay: bool = True, codebook: int = 0) -> Compressor:
    checks.not_negative("tv:gamma", gamma)
    if codebook:
        checks.count("tv:codebook", codebook)

    def compress(key: Key, round: Scalar, x: Array) -> Compressed:
        today = total_variation.decayed(gamma, round) if decay else gamma
        if not codebook:
            return total_variation.compress(x, today)
        return _codebook(codebook).compress(key, round, total_variation.update(x, today).value)

    return Compressor(compress)


def _codebook(size: int = 3) -> Compressor:
    checks.count("codebook:size", size)
    return Compressor(lambda key, round, x: quantizers.codebook(x, size))


COMPRESSORS: Mapping[str, Callable[..., Compressor]] = {
    "lossless": _lossless,
    "qsgd": _qsgd,
    "top-k": _top_k,
    "sign": _sign,
    "uniform": _uniform,
    "tv": _tv,
    "codebook": _codebook,
}
"""Name -> ``**arguments -> Compressor``."""
