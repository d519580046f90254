"""Convolutions and pooling operations in any layout, in forms that are fast when every client has a different kernel.

``vmap`` over kernels turns ``lax.conv`` into a grouped convolution, which XLA runs slowly. Instead, this module
computes a convolution as one product of patches with the kernel, and a pooling operation as a maximum or sum over the
positions of a window. `conv` and `pool` take the parameters ``given`` to the JAX primitives that they replace, so that
`rewriting` can call them. Both functions transpose their input so that the batch is the last dimension (as in the
module `convolution`, whose symbols N, C, O, H and W this module uses too), and transpose the result back. XLA cancels
these transpositions between two layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpfl.core.types import Array
from jaxpfl.models import convolution

MOST_PLACES = 127
"""Largest number of positions in a window. The number is limited because each position adds a copy of the input, and
the index of a maximum is an int8.
"""


def why_not_conv(kernel_shape: tuple[int, ...], given: Mapping[str, Any]) -> str | None:
    """Return the reason why `conv` cannot replace ``conv_general_dilated`` with these parameters; None if it can."""
    places = math.prod(kernel_shape[d] for d in given["dimension_numbers"].rhs_spec[2:])
    if given["batch_group_count"] != 1:
        return "the batch is in groups"
    if places > MOST_PLACES:
        return f"its kernel has {places} positions, more than {MOST_PLACES}"
    return None


def conv(x: Array, kernel: Array, given: Mapping[str, Any]) -> Array:
    """``lax.conv_general_dilated_p`` as a product of patches with the kernel; the result differs only by rounding.

    Args:
      x: input. Input, kernel and result have the layouts that ``given`` defines.
      kernel: kernel of one client.
      given: parameters of the primitive: strides, padding, dilations, groups of features.
    """
    kernel = _channels_last(kernel, given)
    groups = given["feature_group_count"]
    x = _batch_minor(x, given)
    *sizes, channels, features = kernel.shape
    axes = zip(x.shape[1:-1], sizes, given["window_strides"], given["rhs_dilation"], strict=True)
    windows = [_Shifts.create(*axis) for axis in axes]
    form = _channel_products if groups > 1 and channels == 1 else _patch_products
    y = form(x, kernel, windows, given)
    return restore_layout(y.reshape(features, *(window.windows for window in windows), x.shape[-1]), given)


def conv_to_pool(x: Array, kernel: Array, given: Mapping[str, Any]) -> tuple[Array, Array]:
    """Convert input and kernel of a convolution to [C, H, W, N] and [k, k, C, O], for `convolution.conv_pool`."""
    return _batch_minor(x, given), _channels_last(kernel, given)


def fits_pool(kernel_shape: tuple[int, ...], given: Mapping[str, Any]) -> bool:
    """Return True if `convolution.conv_pool` can compute a convolution together with the pool that follows."""
    sizes = [kernel_shape[axis] for axis in given["dimension_numbers"].rhs_spec[2:]]
    ones = (*given["window_strides"], *given["rhs_dilation"], given["feature_group_count"])
    plain = given["precision"] is None and given["preferred_element_type"] is None
    return len(sizes) == 2 and sizes[0] == sizes[1] and set(ones) == {1} and plain


def is_half_max(given: Mapping[str, Any], spatial: tuple[int, ...]) -> bool:
    """Return True for a 2 x 2 maximum over these axes with stride 2 and without padding."""
    shape = tuple(2 if axis in spatial else 1 for axis in range(len(given["window_dimensions"])))
    ones = (*given["base_dilation"], *given["window_dilation"])
    same = tuple(given["window_dimensions"]) == tuple(given["window_strides"]) == shape
    return same and set(ones) == {1} and not any(any(pair) for pair in given["padding"])


def _channels_last(kernel: Array, given: Mapping[str, Any]) -> Array:
    of = given["dimension_numbers"].rhs_spec
    return kernel.transpose(*of[2:], of[1], of[0])  # [..., C / G, O]


def _batch_minor(x: Array, given: Mapping[str, Any]) -> Array:
    """Convert the input to [C, ..., N], padded and dilated."""
    of = given["dimension_numbers"].lhs_spec
    x = x.transpose(of[1], *of[2:], of[0])
    pairs = zip(given["padding"], given["lhs_dilation"], strict=True)
    around = [(low, high, dilation - 1) for (low, high), dilation in pairs]
    if any(any(one) for one in around):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    return x


def restore_layout(y: Array, given: Mapping[str, Any]) -> Array:
    """Convert a result [O, ..., N] to the layout of the primitive."""
    of = given["dimension_numbers"].out_spec
    back = [0] * y.ndim
    for axis, place in enumerate((of[1], *of[2:], of[0])):
        back[place] = axis
    return y.transpose(back)


class _Shifts(NamedTuple):
    """Positions of a window along one axis.

    Attributes:
      starts: start of the slice for each position in the window.
      windows: number of windows.
      stride: distance between windows.
    """

    starts: tuple[int, ...]
    windows: int
    stride: int

    @classmethod
    def create(cls, size: int, window: int, stride: int, dilation: int) -> _Shifts:
        windows = (size - (window - 1) * dilation - 1) // stride + 1
        return cls(tuple(i * dilation for i in range(window)), max(windows, 0), stride)

    def slices(self, x: Array, axis: int) -> list[Array]:
        """Return one slice of x for each position in the window; a slice's ``axis`` runs over the windows."""
        ends = [start + (self.windows - 1) * self.stride + 1 for start in self.starts]
        return [
            lax.slice_in_dim(x, start, max(end, start), self.stride, axis)
            for start, end in zip(self.starts, ends, strict=True)
        ]


def _patch_products(x: Array, kernel: Array, windows: list[_Shifts], given: Mapping[str, Any]) -> Array:
    """Convolve x [C, ..., N] with a kernel [..., C / G, O] by one product for each of G groups of features."""
    # The last axis is shifted first: its shifts are then next to the channels, and shifts along other axes copy whole
    # rows.
    groups, columns = given["feature_group_count"], x.shape[-1] * math.prod(window.windows for window in windows)
    *sizes, channels, features = kernel.shape
    x = x.reshape(groups, channels, *x.shape[1:])
    for axis in reversed(range(len(windows))):
        x = jnp.concatenate(windows[axis].slices(x, axis + 2), axis=1)
    if given["precision"] is None and given["preferred_element_type"] is None and groups == 1:
        return convolution.project(kernel.reshape(-1, features), x.reshape(-1, columns))
    rows = math.prod(sizes) * channels
    kernel = kernel.reshape(rows, groups, features // groups)
    dimensions = (((0,), (1,)), ((1,), (0,)))  # contract rows, batch over G
    how = {"precision": given["precision"], "preferred_element_type": given["preferred_element_type"]}
    return lax.dot_general(kernel, x.reshape(groups, rows, columns), dimensions, **how)


def _channel_products(x: Array, kernel: Array, windows: list[_Shifts], given: Mapping[str, Any]) -> Array:
    """Same as `_patch_products` for one input channel per group (depthwise), by elementwise products."""
    groups, slices = given["feature_group_count"], [x]
    for axis, window in enumerate(windows):
        slices = [one for part in slices for one in window.slices(part, axis + 1)]
    kernel = kernel.reshape(len(slices), groups, -1)
    terms = [one[:, None] * jnp.expand_dims(kernel[place], range(2, x.ndim + 1)) for place, one in enumerate(slices)]
    return functools.reduce(jnp.add, terms)


def why_not_pool(kind: str, given: Mapping[str, Any], dtype: Any) -> str | None:
    """Return the reason why `pool` cannot replace this maximum or sum over windows; None if it can."""
    places = math.prod(given["window_dimensions"])
    if any(dilation != 1 for dilation in given["base_dilation"]):
        return "its input is dilated"
    if places > MOST_PLACES:
        return f"its windows have {places} positions, more than {MOST_PLACES}"
    if kind == "max" and not jnp.issubdtype(dtype, jnp.floating):
        return f"it takes the maximum of {dtype}"
    return None


def pool(x: Array, kind: str, given: Mapping[str, Any]) -> Array:
    """``lax.reduce_window_max_p`` or ``lax.reduce_window_sum_p``.

    The gradient of a maximum goes to the first maximum of a window in row-major order, as in ``lax``. Ties are common,
    because blank borders have equal values.

    Args:
      x: array of any shape.
      kind: "max" or "sum".
      given: parameters of the primitive: windows, strides, padding, dilation.
    """
    sizes, strides, dilations = (given[name] for name in ("window_dimensions", "window_strides", "window_dilation"))
    if any(any(pair) for pair in given["padding"]):
        fill = jnp.array(-jnp.inf if kind == "max" else 0, x.dtype)
        x = lax.pad(x, fill, [(low, high, 0) for low, high in given["padding"]])
    windows = [_Shifts.create(*axis) for axis in zip(x.shape, sizes, strides, dilations, strict=True)]
    pooled = [axis for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if (size, stride) != (1, 1)]
    if all(sizes[axis] == strides[axis] and dilations[axis] == 1 for axis in pooled):
        shape: list[int] = []
        places: list[int] = []
        for axis, (window, size) in enumerate(zip(windows, sizes, strict=True)):
            x = lax.slice_in_dim(x, 0, window.windows * size, axis=axis) if axis in pooled else x
            shape += [window.windows, size] if axis in pooled else [x.shape[axis]]
            places += [len(shape) - 1] if axis in pooled else []
        x = x.reshape(shape)
    else:
        slices = [x]
        for axis in pooled:
            slices = [one for part in slices for one in windows[axis].slices(part, axis)]
        x, places = jnp.stack(slices), [0]
    return _first_max(x, tuple(places)) if kind == "max" else x.sum(axis=tuple(places), dtype=x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _first_max(x: Array, axes: tuple[int, ...]) -> Array:
    """Maximum over ``axes``; the gradient goes to the first maximum in row-major order."""
    return _max_and_first(x, axes)[0]


# This is a plain function, so that ``jvp`` of a gradient works, and elementwise, so that XLA fuses its operations.
def _max_and_first(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    def window_values(places: tuple[int, ...]) -> Array:
        index: list[Any] = [slice(None)] * x.ndim
        for axis, place in zip(axes, places, strict=True):
            index[axis] = place
        return x[tuple(index)]

    start, *others = itertools.product(*(range(x.shape[axis]) for axis in axes))
    largest = window_values(start)
    first = jnp.zeros(largest.shape, jnp.int8)
    for number, places in enumerate(others, 1):
        one = window_values(places)
        first = jnp.where(one > largest, jnp.int8(number), first)
        largest = jnp.maximum(largest, one)
    return largest, first


def _first_max_fwd(x: Array, axes: tuple[int, ...]) -> tuple[Array, tuple[Array, Array]]:
    largest, first = _max_and_first(x, axes)
    return largest, (first, jnp.zeros((0, *(x.shape[axis] for axis in axes)), jnp.int8))


def _first_max_bwd(axes: tuple[int, ...], residuals: tuple[Array, Array], g: Array) -> tuple[Array]:
    first, (_, *sizes) = residuals[0], residuals[1].shape
    shape = list(g.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape.insert(axis, size)
    number = jnp.zeros(shape, jnp.int8)
    for i, axis in enumerate(axes):
        number = number + lax.broadcasted_iota(jnp.int8, shape, axis) * math.prod(sizes[i + 1 :])
    mine = jnp.expand_dims(first, axes) == number
    return (jnp.where(mine, jnp.expand_dims(g, axes), jnp.zeros((), g.dtype)),)


_first_max.defvjp(_first_max_fwd, _first_max_bwd)
