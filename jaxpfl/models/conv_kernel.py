"""Convolutions as GPU kernels (Pallas, lowered to Triton) that do not write the patches of their inputs to memory.

The module `convolution` copies the patches of an input to memory before it multiplies them by a client's kernel. For
the kernels of this module, a matrix of patches exists only in parts: a program instance loads some rows (positions in a
window, or taps) and some columns (windows of the examples), and multiplies them at once. Bias, relu and a 2x2 max-pool
are part of the kernel. With a client axis, `vmap` adds an axis to the grid. Arrays in Triton have powers of two as
sizes, products have at least 16, and the entries beyond an array are masked.

The results differ from the results of `convolution` only by the order of additions. If a gradient is differentiated
again (as in Per-FedAvg), its derivative is computed in the form of `convolution`.

Symbols are as in `convolution`. T = k k C is the number of taps, and P = h w N is the number of places, which are the
windows of the examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpfl.core.types import Array
from jaxpfl.models import convolution

_LEAST, _TAPS, _FEATURES, _PLACES = 16, 32, 64, 128
"""Smallest block, and the largest blocks of taps, features and places; with a pool, a fourth of the features. Compiled
for an H200, the kernels of the registered CNN then spill no register."""
_PART = 512
"""Number of places whose gradients a program instance adds; parts give small cohorts more instances."""

FORMS = "kernel", "interpreted"
"""Forms in which layers run in kernels; see `convolution.form`."""
CALL = "conv_in_kernel"
"""Name of the kernels in traced programs."""


class _Layer(NamedTuple):
    """A convolution without padding, for inputs and kernels of these shapes.

    With ``pool``, the result is pooled, and a place has the convolution's values at the four ``shifts``.
    """

    x: tuple[int, ...]
    kernel: tuple[int, ...]
    interpreted: bool
    stride: int = 1
    pool: bool = False

    @property
    def out(self) -> tuple[int, int]:
        h, w = ((size - self.kernel[0]) // self.stride + 1 for size in self.x[1:3])
        return (h // 2, w // 2) if self.pool else (h, w)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel[:3])

    @property
    def places(self) -> int:
        return math.prod(self.out) * self.x[3]

    @property
    def shifts(self) -> Sequence[tuple[int, int]]:
        return [(p, q) for p in (0, 1) for q in (0, 1)] if self.pool else [(0, 0)]


def conv(x: Array, kernel: Array, *, stride: int = 1, padding: Literal["VALID", "SAME"] = "VALID") -> Array:
    """`convolution.conv`, in the chosen form (`convolution.form`)."""
    form = convolution.chosen()
    if form not in FORMS:
        return convolution.conv(x, kernel, stride=stride, padding=padding)
    x = convolution.padded(x, kernel.shape[0], stride) if padding == "SAME" else x
    s = _Layer(x.shape, kernel.shape, form == "interpreted", stride)
    return _layer(s, partial(convolution.conv, stride=stride))(x, kernel)


def conv_pool(x: Array, kernel: Array, bias: Array) -> Array:
    """`convolution.conv_pool`, in the chosen form (`convolution.form`)."""
    form = convolution.chosen()
    if form not in FORMS:
        return convolution.conv_pool(x, kernel, bias)
    s = _Layer(x.shape, kernel.shape, form == "interpreted", pool=True)
    return _layer(s, convolution.conv_pool)(x, kernel, bias)


def _layer(s: _Layer, plain: Callable[..., Array]) -> Callable[..., Array]:
    """Return the layer in kernels; derivatives of its gradient are computed as those of ``plain``."""

    def plain_forward(*arrays: Array) -> tuple[Array, ...]:
        y = jax.vjp(plain, *arrays)[0]  # `plain` itself can only be differentiated in reverse mode
        return (y, jnp.zeros(y.shape, jnp.int8)) if s.pool else (y,)

    def gradients(arrays: tuple[Array, ...], first: tuple[Array, ...], g: Array) -> tuple[Array, ...]:
        d_bias = [jnp.where(one < 4, g, jnp.zeros((), g.dtype)).sum(axis=(1, 2, 3)) for one in first]
        return _input_gradient(s, arrays[1], g, *first), _kernel_gradient(s, arrays[0], g, *first), *d_bias

    forward = _with_derivative(partial(_forward, s), plain_forward)
    backward = _with_derivative(gradients, lambda arrays, first, g: jax.vjp(plain, *arrays)[1](g))
    layer = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])

    def forward_rule(*arrays: Array) -> tuple[Array, tuple[tuple[Array, ...], ...]]:
        y, *first = forward(*arrays)
        return y, (arrays, tuple(first))

    layer.defvjp(forward_rule, lambda residuals, g: backward(*residuals, g))
    return layer


def _with_derivative(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with the derivative of an equal one, ``plain``."""
    both = jax.custom_jvp(function)
    both.defjvp(lambda given, tangents: (both(*given), jax.jvp(plain, given, tangents)[1]))
    return both


def _forward(s: _Layer, x: Array, kernel: Array, *bias: Array) -> tuple[Array, ...]:
    """Result [O, h, w, N], and with a pool also the index of the first maximum (`convolution.max_bias_relu`)."""
    features = s.kernel[3]
    taps, rows, columns = _block(s.taps, _TAPS), _block(features, _FEATURES // len(s.shifts)), _block(s.places, _PLACES)

    def instance(nth: Array, group: Array, x: Any, kernel: Any, *others: Any) -> None:
        feature, place = _range(group, rows), _range(nth, columns)

        def add(turn: Array, sums: list[Array]) -> list[Array]:
            tap = _range(turn, taps)
            mask = _both(feature < features, tap < s.taps)
            weights = _load(kernel, tap[None, :] * features + feature[:, None], mask)
            pairs = zip(sums, s.shifts, strict=True)
            return [total + _dot(weights, _patches(s, x, tap, place, shift), 0) for total, shift in pairs]

        zeros = [jnp.zeros((rows, columns), _wide(x.dtype))] * len(s.shifts)
        sums = lax.fori_loop(0, -(-s.taps // taps), add, zeros)
        at, mask = feature[:, None] * s.places + place[None, :], _both(feature < features, place < s.places)
        if not s.pool:
            return _store(others[0], at, sums[0], mask)
        bias = _load(others[0], feature, feature < features)[:, None]
        for ref, found in zip(others[1:], convolution.max_bias_relu(sums, bias), strict=True):
            _store(ref, at, found, mask)

    shape = (features, *s.out, s.x[3])
    found = [jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct(shape, jnp.int8)][: 1 + s.pool]
    return _call(s, instance, (-(-s.places // columns), -(-features // rows)), found, x, kernel, *bias)


def _kernel_gradient(s: _Layer, x: Array, g: Array, *first: Array) -> Array:
    features, parts = s.kernel[3], -(-s.places // _PART)
    taps, rows, columns = (
        _block(s.taps, _TAPS),
        _block(features, _FEATURES // len(s.shifts)),
        _block(s.places, _PLACES // 2),
    )
    turns = -(-s.places // (parts * columns))

    def instance(nth: Array, group: Array, part: Array, x: Any, g: Any, *others: Any) -> None:
        tap, feature = _range(nth, taps), _range(group, rows)

        def add(turn: Array, total: Array) -> Array:
            place = _range(part * turns + turn, columns)
            at, mask = feature[:, None] * s.places + place[None, :], _both(feature < features, place < s.places)
            slope = _load(g, at, mask)
            where = _load(others[0], at, mask) if s.pool else None
            for number, shift in enumerate(s.shifts):
                mine = slope if where is None else jnp.where(where == number, slope, 0)
                total = total + _dot(_patches(s, x, tap, place, shift), mine, 1)
            return total

        total = lax.fori_loop(0, turns, add, jnp.zeros((taps, rows), _wide(x.dtype)))
        at = (part * s.taps + tap[:, None]) * features + feature[None, :]
        _store(others[-1], at, total, _both(tap < s.taps, feature < features))

    found = [jax.ShapeDtypeStruct((parts, *s.kernel), _wide(x.dtype))]
    grid = -(-s.taps // taps), -(-features // rows), parts
    return _call(s, instance, grid, found, x, g, *first)[0].sum(axis=0).astype(x.dtype)


def _input_gradient(s: _Layer, kernel: Array, g: Array, *first: Array) -> Array:
    # Here places are the input's pixels, and taps are positions in a window and features.
    (k, _, channels, features), (_, height, width, batch), (h, w) = s.kernel, s.x, s.out
    places, depth, scale = height * width * batch, k * k * features, 2 if s.pool else 1
    taps, rows, columns = _block(depth, _TAPS), _block(channels, _FEATURES // len(s.shifts)), _block(places, _PLACES)

    def instance(nth: Array, group: Array, kernel: Any, g: Any, *others: Any) -> None:
        channel, place = _range(group, rows), _range(nth, columns)
        row, column, n = _digits(place, width, batch)

        def add(turn: Array, total: Array) -> Array:
            tap = _range(turn, taps)
            i, j, feature = _digits(tap, k, features)
            mask = _both(channel < channels, tap < depth)
            at = ((i * k + j)[None, :] * channels + channel[:, None]) * features + feature[None, :]
            weights = _load(kernel, at, mask)
            ends = row[None, :] - i[:, None], column[None, :] - j[:, None]
            (a, p), (b, q) = (_digits(end, s.stride * scale) for end in ends)
            inside = (ends[0] >= 0) & (ends[1] >= 0) & (a < h) & (b < w)
            at, mask = ((feature[:, None] * h + a) * w + b) * batch + n[None, :], _both(tap < depth, place < places)
            slope = _load(g, at, mask & inside)
            if s.pool:
                slope = jnp.where(_load(others[0], at, mask & inside) == 2 * p + q, slope, 0)
            elif s.stride > 1:
                slope = jnp.where((p == 0) & (q == 0), slope, 0)
            return total + _dot(weights, slope, 0)

        total = lax.fori_loop(0, -(-depth // taps), add, jnp.zeros((rows, columns), _wide(kernel.dtype)))
        at, mask = channel[:, None] * places + place[None, :], _both(channel < channels, place < places)
        _store(others[-1], at, total, mask)

    found = [jax.ShapeDtypeStruct(s.x, kernel.dtype)]
    grid = -(-places // columns), -(-channels // rows)
    return _call(s, instance, grid, found, kernel, g, *first)[0]


def _patches(s: _Layer, x: Any, tap: Array, place: Array, shift: tuple[int, int]) -> Array:
    """Entries of the matrix of patches, [taps, places], for one shift of the windows in a pool."""
    _, height, width, batch = s.x
    i, j, channel = _digits(tap, s.kernel[0], s.kernel[2])
    *at, n = _digits(place, s.out[1], batch)
    step = 2 if s.pool else s.stride  # the windows of a pool have stride 2
    row, column = (step * a + p for a, p in zip(at, shift, strict=True))
    starts, offsets = (row * width + column) * batch + n, ((channel * height + i) * width + j) * batch
    return _load(x, offsets[:, None] + starts[None, :], _both(tap < s.taps, place < s.places))


def _call(
    s: _Layer, instance: Callable[..., None], grid: tuple[int, ...], found: list[Any], *given: Array
) -> tuple[Array, ...]:
    """Run a kernel on flat arrays; an instance gets its place in the grid, and then the arrays and results."""
    from jax.experimental import pallas as pl  # only here, because the import takes time
    from jax.experimental.pallas import triton

    def kernel(*refs: Any) -> None:
        instance(*(pl.program_id(axis) for axis in range(len(grid))), *refs)

    shapes = [jax.ShapeDtypeStruct((math.prod(a.shape),), a.dtype) for a in found]
    options: dict[str, Any] = {"interpret": s.interpreted, "name": CALL}
    options["compiler_params"] = triton.CompilerParams(num_warps=4, num_stages=2)
    new = pl.pallas_call(kernel, grid=grid, out_shape=shapes, **options)(*(a.reshape(-1) for a in given))
    return tuple(a.reshape(shape.shape) for a, shape in zip(new, found, strict=True))


def _load(ref: Any, at: Array, mask: Array) -> Array:
    from jax.experimental.pallas import triton

    return triton.load(ref.at[at], mask=mask, other=0)


def _store(ref: Any, at: Array, value: Array, mask: Array) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref.at[at], value.astype(ref.dtype), mask=mask)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Product of a [A, B] with b [B, D], or for ``axis`` = 1 with the transpose of b [D, B]."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=_wide(a.dtype))


def _block(size: int, most: int) -> int:
    """Smallest power of two that is at least ``size``, but at least 16 and at most ``most``."""
    return min(max(_LEAST, 1 << (size - 1).bit_length()), most)


def _range(nth: Array, size: int) -> Array:
    return nth * size + jnp.arange(size, dtype=jnp.int32)


def _both(rows: Array, columns: Array) -> Array:
    return rows[:, None] & columns[None, :]


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _digits(number: Array, *sizes: int) -> list[Array]:
    """Digits of a number in a mixed base, the largest first; the first digit has no limit."""
    digits = []
    for size in reversed(sizes):
        digits.append(lax.rem(number, jnp.int32(size)))
        number = lax.div(number, jnp.int32(size))
    return [number, *reversed(digits)]
