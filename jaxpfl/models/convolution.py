"""Per-client convolution and pooling, as pure functions of arrays [C, H, W, N], whose last dimension is the batch.

When each client has its own kernel, ``vmap`` turns ``lax.conv`` into a grouped convolution. XLA runs grouped
convolutions slowly, and their backward passes even more slowly. This module computes a convolution as one matrix
product of the kernel with the input's patches. With a client axis, the product becomes a batched ``dot_general``. With
the batch as the last dimension, every row of patches is contiguous in memory. Patches are therefore collected by
copying shifted inputs: first for all shifts along W, then for all shifts of whole rows along H.

Kernels have the layout of ``flax.linen.Conv``, [k, k, C, O] ("HWIO").

N is the size of the batch, H x W and h x w the sizes of the inputs and outputs, and C and O the numbers of their
channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpfl.core.types import Array

Form = Literal["products", "kernel", "interpreted", "plain"]

_form = jax.make_user_context("products")


def form(of: Form) -> AbstractContextManager[Any]:
    """Return a context manager in which programs are traced with convolutions in the form ``of``.

    "products" (the default) are this module's products of patches, and "kernel" are the kernels of `conv_kernel`, which
    "interpreted" runs operation by operation on any device. With "plain", a user's own model keeps its own operations.
    """
    return _form(of)


def chosen() -> Form:
    """Return the form in which programs are traced now."""
    return _form.value


@jax.custom_vjp
def project(kernel: Array, x: Array) -> Array:
    """Product ``kernel^T x``, [O, X], of a kernel [P, O] and features-first inputs [P, X].

    The custom gradients are equal to the automatic gradients, but use faster matrix products. Let g be the gradient
    with respect to the product. If X is large and O small, XLA's CPU kernels compute ``x g^T``, [P, O], twice as fast
    as its transpose ``g x^T``, [O, P].
    """
    return _project(kernel, x)


# Forward rules call the function without the custom rule, so that ``jvp`` of a gradient works.
def _project(kernel: Array, x: Array) -> Array:
    return lax.dot_general(kernel, x, (((0,), (0,)), ((), ())))


def _project_bwd(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    kernel, x = residuals
    d_kernel = lax.dot_general(x, g, (((1,), (1,)), ((), ())))
    d_x = lax.dot_general(kernel, g, (((1,), (0,)), ((), ())))
    return d_kernel, d_x


project.defvjp(lambda kernel, x: (_project(kernel, x), (kernel, x)), _project_bwd)


def conv(x: Array, kernel: Array, *, stride: int = 1, padding: Literal["VALID", "SAME"] = "VALID") -> Array:
    """Convolution y [O, h, w, N] of x [C, H, W, N] with a kernel [k, k, C, O]; strides and padding are as in ``lax``.

    With s = ``stride``, y[o, h, w, n] = sum_{i, j, c} kernel[i, j, c, o] x[c, s h + i, s w + j, n].

    VALID: the height of y is (H - k) // s + 1. SAME: x is surrounded by zeros, and the height of y is ceil(H / s); if
    the number of zeros along an axis is odd, the extra zero is at the end.
    """
    k, channels, features = kernel.shape[0], x.shape[0], kernel.shape[-1]
    x = padded(x, k, stride) if padding == "SAME" else x
    h, w, n = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1, x.shape[3]
    ends = stride * (h - 1) + 1, stride * (w - 1) + 1
    shifted = jnp.concatenate([x[:, :, j : j + ends[1] : stride] for j in range(k)])  # [k C, H, w, N], C fastest
    patches = jnp.concatenate([shifted[:, i : i + ends[0] : stride] for i in range(k)])  # [k k C, h, w, N]
    rows = k * k * channels
    y = project(kernel.reshape(rows, features), patches.reshape(rows, h * w * n))
    return y.reshape(features, h, w, n)


def padded(x: Array, k: int, stride: int) -> Array:
    """Surround x [C, H, W, N] by the zeros of the padding SAME."""
    return jnp.pad(x, ((0, 0), _same_padding(x.shape[1], k, stride), _same_padding(x.shape[2], k, stride), (0, 0)))


def _same_padding(size: int, k: int, stride: int) -> tuple[int, int]:
    """Return how many zeros to add before and after an axis so that ceil(size / stride) windows of length k fit."""
    missing = max((-(-size // stride) - 1) * stride + k - size, 0)
    return missing // 2, missing - missing // 2


def max_pool(x: Array) -> Array:
    """2x2 max-pool with stride 2, which drops an odd last row or column.

    Inputs [C, H, W, N] give outputs [C, H//2, W//2, N]. The gradient goes to the first maximum of a window in row-major
    order, as with ``lax.reduce_window``. Ties are common (blank borders have equal values), and ``jnp.maximum`` would
    split the gradient between tied entries.
    """
    h, w = x.shape[1] // 2, x.shape[2] // 2
    return _max_of_four(jnp.stack([x[:, p : 2 * h : 2, q : 2 * w : 2] for p in (0, 1) for q in (0, 1)]))


@jax.custom_vjp
def _max_of_four(z: Array) -> Array:
    """Maximum of z [4, ...] over axis 0; the gradient goes to the first maximum."""
    return _max_and_first(z)[0]


def _max_and_first(z: Array | Sequence[Array]) -> tuple[Array, Array]:
    """Return the maximum of four arrays, and the index of the first maximum (int8, to save memory)."""
    top, bottom = jnp.maximum(z[0], z[1]), jnp.maximum(z[2], z[3])
    in_top, in_bottom = (z[1] > z[0]).astype(jnp.int8), (z[3] > z[2]).astype(jnp.int8)
    return jnp.maximum(top, bottom), jnp.where(bottom > top, 2 + in_bottom, in_top)


def _scatter_to_first(first: Array, g: Array) -> Array:
    """Place every entry of g [...] at the index in ``first`` [...] along a new axis of length 4; 4 leaves it out."""
    zero = jnp.zeros((), g.dtype)
    return jnp.stack([jnp.where(first == i, g, zero) for i in range(4)])


def _max_of_four_bwd(first: Array, g: Array) -> tuple[Array]:
    return (_scatter_to_first(first, g),)


_max_of_four.defvjp(_max_and_first, _max_of_four_bwd)


def conv_pool(x: Array, kernel: Array, bias: Array) -> Array:
    """``relu(max_pool(conv(x, kernel)) + bias)``, [O, (H-k+1)//2, (W-k+1)//2, N].

    The arguments have the shapes [C, H, W, N], [k, k, C, O] and [O].

    The result is equal to ``max_pool(relu(conv(x, kernel) + bias))``, in which pooling is last: adding a bias and
    applying relu are monotone, so both operations commute with the maximum. The gradients are also equal, in exact
    arithmetic. Where the result is positive, both formulas have the same first maximum: adding the same bias to all
    values keeps their order and ties, and relu changes only values that are not positive. Where the result is zero,
    both gradients are zero (``jax.nn.relu`` has slope 0 at 0). In floating point, adding the bias may round two
    different values to the same value, and the first maximum can then differ.

    The four convolution values of a pooling window depend on one (k+1) x (k+1) patch of the input, and become four
    features of this patch. Patches have stride 2, because pooling windows do not overlap. The kernel matrix,
    [(k+1)^2 C, 4 O], contains four zero-padded copies of the kernel, one for each shift by 0 or 1 along the two axes.
    For k = 5, this form has 1.44 times as many multiplications as the plain
    convolution, its matrix of patches has 0.36 times as many entries, and pooling reads four contiguous blocks. On a
    CPU, this form was measured to be a fifth to a third faster than pooling the plain convolution for 1 to 6 channels,
    and not slower for 64.
    """
    return _max_bias_relu(_windows(x, kernel), bias)


def conv_max(x: Array, kernel: Array) -> Array:
    """``max_pool(conv(x, kernel))``, computed as in `conv_pool`, for x [C, H, W, N] and a kernel [k, k, C, O]."""
    return _max_of_four(_windows(x, kernel))


def _windows(x: Array, kernel: Array) -> Array:
    """Compute the convolution at the four positions of each pooling window, [4, O, h, w, N]."""
    k, features = kernel.shape[0], kernel.shape[-1]
    h, w, n = (x.shape[1] - k + 1) // 2, (x.shape[2] - k + 1) // 2, x.shape[-1]
    z = project(_window_kernel(kernel), _window_patches(x, k))
    return z.reshape(4, features, h, w, n)


@jax.custom_vjp
def _max_bias_relu(z: Array, bias: Array) -> Array:
    """``relu(z.max(axis=0) + bias)`` for z [4, O, h, w, N] and bias [O]; the gradient goes to the first maximum.

    For the backward pass, one int8 per output is stored: the maximum's index, or 4 where the slope of relu is zero.
    """
    return _max_bias_relu_fwd(z, bias)[0]


def _max_bias_relu_fwd(z: Array, bias: Array) -> tuple[Array, Array]:
    # The arrays are not flattened to [O, h w N]: XLA would then fuse this function with the next layer's patches, and
    # compute the position of each element by a division (measured: 10 % of a step).
    return max_bias_relu(z, bias[:, None, None, None])


def max_bias_relu(z: Array | Sequence[Array], bias: Array) -> tuple[Array, Array]:
    """Return ``relu(max(z) + bias)`` for four arrays z, and the index of the first maximum, or 4 where relu is flat."""
    largest, first = _max_and_first(z)
    shifted = largest + bias
    # `<= 0` is false for NaN, which must reach the gradient; otherwise a diverged client would not be detected.
    return jax.nn.relu(shifted), jnp.where(shifted <= 0, jnp.int8(4), first)


def _max_bias_relu_bwd(first: Array, g: Array) -> tuple[Array, Array]:
    d_bias = jnp.where(first < 4, g, jnp.zeros((), g.dtype)).sum(axis=(1, 2, 3))
    return _scatter_to_first(first, g), d_bias


_max_bias_relu.defvjp(_max_bias_relu_fwd, _max_bias_relu_bwd)


def _window_kernel(kernel: Array) -> Array:
    """Kernel [k, k, C, O], shifted to the four positions of a pooling window: a matrix [(k+1)^2 C, 4 O]."""
    k, _, channels, features = kernel.shape
    shifts = [
        jnp.pad(kernel, ((p, 1 - p), (q, 1 - q), (0, 0), (0, 0))) for p in (0, 1) for q in (0, 1)
    ]  # 4 x [k+1, k+1, C, O]
    return jnp.stack(shifts, axis=3).reshape((k + 1) ** 2 * channels, 4 * features)


def _plane_sizes(size: int, k: int) -> tuple[int, int]:
    """Return the size of an input axis after pooling, and the size of each plane (its even or its odd entries)."""
    pooled = (size - k + 1) // 2
    return pooled, pooled + k // 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _window_patches(x: Array, k: int) -> Array:
    """Extract all (k+1) x (k+1) patches of x [C, H, W, N] with stride 2, on an h x w grid, as [(k+1)^2 C, h w N].

    Rows are ordered (i, j, c), where (i, j) is a position in a patch. Even and odd rows and columns of x are first
    separated into planes, so that the entries of all patches at one position are a contiguous slice of one plane. The
    backward pass adds whole slices, and interleaves the planes once; strided slices would need interleaving for every
    slice.
    """
    return _gather_windows(x, k)


def _gather_windows(x: Array, k: int) -> Array:
    channels, height, width, n = x.shape
    (h, hh), (w, ww) = _plane_sizes(height, k), _plane_sizes(width, k)
    x = _resize(_resize(x, 1, 2 * hh), 2, 2 * ww)
    planes = x.reshape(channels, hh, 2, ww, 2, n).transpose(2, 4, 0, 1, 3, 5)  # [2, 2, C, hh, ww, N]
    columns = jnp.concatenate(
        [planes[:, j % 2, :, :, j // 2 : j // 2 + w] for j in range(k + 1)], axis=1
    )  # [2, (k+1) C, hh, w, N]
    patches = jnp.concatenate([columns[i % 2, :, i // 2 : i // 2 + h] for i in range(k + 1)])
    return patches.reshape((k + 1) ** 2 * channels, h * w * n)


def _window_patches_fwd(x: Array, k: int) -> tuple[Array, tuple[Array]]:
    # The backward pass needs only the shape of x; an array without elements carries it through jit and vmap.
    return _gather_windows(x, k), (jnp.zeros((0, *x.shape), x.dtype),)


def _window_patches_bwd(k: int, residuals: tuple[Array], g: Array) -> tuple[Array]:
    channels, height, width, n = residuals[0].shape[1:]
    (h, hh), (w, ww) = _plane_sizes(height, k), _plane_sizes(width, k)
    g = g.reshape(k + 1, (k + 1) * channels, h, w, n)
    rows = _overlap_add([g[i] for i in range(k + 1)], axis=1, size=hh)  # [2, (k+1) C, hh, w, N]
    rows = rows.reshape(2, k + 1, channels, hh, w, n)
    planes = _overlap_add([rows[:, j] for j in range(k + 1)], axis=3, size=ww)  # [2 (W), 2 (H), C, hh, ww, N]
    d_x = planes.transpose(2, 3, 1, 4, 0, 5).reshape(channels, 2 * hh, 2 * ww, n)
    return (_resize(_resize(d_x, 1, height), 2, width),)


_window_patches.defvjp(_window_patches_fwd, _window_patches_bwd)


def _overlap_add(slices: list[Array], axis: int, size: int) -> Array:
    """Add slice t to plane t % 2 of `_window_patches`, shifted by t // 2 along `axis`; return both planes."""

    def place(t: int) -> Array:
        widths = [(0, 0)] * slices[t].ndim
        widths[axis] = (t // 2, size - t // 2 - slices[t].shape[axis])
        return jnp.pad(slices[t], widths)

    planes = [[place(t) for t in range(parity, len(slices), 2)] for parity in (0, 1)]
    return jnp.stack([functools.reduce(jnp.add, plane) for plane in planes])


def _resize(x: Array, axis: int, size: int) -> Array:
    """Cut an axis to `size`, or pad it with zeros at the end."""
    x = lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
