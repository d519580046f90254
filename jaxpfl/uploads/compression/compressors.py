r"""Compressors for ``--compress`` and ``jaxpfl.fit(compress=)``.

- ``lossless``: the unchanged numbers, as a baseline.
- ``qsgd:levels=4``: each entry is rounded at random to a multiple of the vector's norm divided by ``levels``, and sent
  in the Elias gamma code; unbiased.
- ``top-k:share=0.01``: only the entries of largest magnitude are sent: the fraction ``share`` of all entries, but at
  least one.
- ``sign``: the sign of each entry, and a common scale, are sent.
- ``uniform:bits=4``: each entry is rounded at random to one of 2^bits levels; unbiased.
- ``tv:gamma=0.1``: the total-variation update (`total_variation`) is sent in the run-length code. Gamma has the units
  of a client's increment and therefore no default. After t finished rounds, :math:`\gamma / \sqrt{t + 1}` is used
  instead of gamma; ``decay=false`` keeps gamma constant. With ``codebook=3``, the update is also quantized to a
  codebook of three numbers.
- ``codebook:size=3``: each entry is rounded to the nearest of three numbers, which are fitted to the vector, and sent
  in the run-length code.

Each compressor also accepts ``feedback=true`` or ``feedback=false``. Error feedback adds the error of a message to the
client's next message (`uploads`). Error feedback is the default for biased compressors. Unbiased compressors need no
error feedback. An unbiased compressor has :math:`E \|Q(x) - x\|^2 \le \omega \|x\|^2`. The factor omega may exceed one,
and an accumulated error would then grow without bound. With error feedback, unbiased compressors therefore send
:math:`Q(x) / (1 + \omega)`, whose expected squared error is at most :math:`\omega / (1 + \omega) < 1` times the squared
norm (Beznosikov et al. 2020, "On Biased Compression for Distributed Learning").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from jaxpfl.core import checks, settings
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.uploads.compression import quantizers, total_variation
from jaxpfl.uploads.compression.quantizers import Compressed

Compress: TypeAlias = Callable[[Key, Scalar, Array], Compressed]
"""Pure function ``(key, round, x [d]) -> Compressed``. Rounds count from 0. A result for non-finite x is not finite."""


class Compressor(NamedTuple):
    """Compressor of vectors.

    Attributes:
      compress: function that compresses a vector.
      feedback: whether to use error feedback; None for the compressor's default.
      omega: for an unbiased compressor C of vectors x [d], function from d to omega such that
        ``E |C(x) - x|^2 <= omega |x|^2``. None for a biased compressor, which must satisfy ``|C(x) - x| <= |x|``.
    """

    compress: Compress
    feedback: bool | None = None
    omega: Callable[[int], float] | None = None

    @property
    def feeds_back(self) -> bool:
        """True if error feedback is used; unless ``feedback`` is set, it is used for biased compressors only."""
        return self.omega is None if self.feedback is None else self.feedback

    def fed_back(self, key: Key, round: Scalar, x: Array) -> Compressed:
        """Compress x with an expected squared error of at most ``|x|^2``, as error feedback requires."""
        sent = self.compress(key, round, x)
        return sent if self.omega is None else sent._replace(value=sent.value / (1 + self.omega(x.shape[0])))


def resolve(compressor: str | Compressor) -> Compressor:
    """Parse a compressor such as ``top-k:share=0.05``; return a `Compressor` unchanged.

    Examples:
      >>> resolve("top-k:share=0.05,feedback=false").feeds_back
      False

    Raises:
      JaxpflError: if the name or an argument is unknown, an argument is missing, or a value is out of range.
    """
    if not isinstance(compressor, str):
        return compressor
    name, values = settings.parse_choice("compressor", compressor, COMPRESSORS, feedback=bool)
    feedback = values.pop("feedback", None)
    return COMPRESSORS[name](**values)._replace(feedback=feedback)


def _lossless() -> Compressor:
    return Compressor(
        lambda key, round, x: Compressed(x, jnp.int32(8 * x.dtype.itemsize * x.shape[0])),
        omega=lambda d: 0.0,  # the error is zero, so error feedback would add nothing
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
        omega=lambda d: d * (2**bits - 1) ** -2,  # each entry's variance is at most (max |x| / L)^2 <= (|x| / L)^2
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
"""Factory functions of the compressors by name; their arguments are keywords."""
