"""Registry of models by name, with checks of input shapes. A new model needs a module, and an entry in the registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxpfl.models.base import Model
from jaxpfl.models.images import (
    CIFAR_WIDTHS,
    RESNET18_WIDTHS,
    SMALLEST_FOR_CNN,
    check_image_shape,
    cnn,
    linear,
    mlp,
    resnet,
    resnet18,
    smallest_for_resnet,
)
from jaxpfl.models.sequences import check_token_shape, gru, transformer
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

Shape = tuple[int, ...]


class _Entry(NamedTuple):
    """A registered model.

    Attributes:
      build: function that builds the model, ``(num_classes) -> Model``, or ``(num_classes, numbers) -> Model`` if the
        name can contain numbers.
      check: function that raises an error for wrong input shapes, before the first batch is traced.
      example: example of a name with numbers; None if the name cannot contain numbers.
      every: whether ``build`` has the argument ``every``, for predictions at each position of a sequence.
    """

    build: Callable[..., Model]
    check: Callable[[Shape], None] = lambda shape: None
    example: str | None = None
    every: bool = False


def _resnet(num_classes: int, depth: Shape = (8,), *, batch: bool = False) -> Model:
    if len(depth) != 1:
        name = "resnet-bn" if batch else "resnet"
        raise JaxpflError(f"{name!r} takes one number, its depth, got {','.join(map(str, depth))}")
    return resnet(num_classes, depth[0], batch=batch)


_CNN = partial(check_image_shape, "CNN", minimum=SMALLEST_FOR_CNN)
_SMALL = partial(check_image_shape, "ResNet", minimum=smallest_for_resnet(CIFAR_WIDTHS))
_LARGE = partial(check_image_shape, "ResNet", minimum=smallest_for_resnet(RESNET18_WIDTHS))
_BUILDERS: dict[str, _Entry] = {
    "linear": _Entry(linear),
    "mlp": _Entry(mlp, example="mlp:128,64"),
    "mlp-ln": _Entry(partial(mlp, norm="layer"), example="mlp-ln:128,64"),
    "mlp-bn": _Entry(partial(mlp, norm="batch"), example="mlp-bn:128,64"),
    "mlp-persfl": _Entry(partial(mlp, hidden=(100,))),
    "cnn": _Entry(cnn, _CNN),
    "cnn-fedavg": _Entry(partial(cnn, filters=(32, 64), hidden=(512,)), _CNN),  # McMahan et al. 2017, as in PFLlib
    "cnn-gn": _Entry(partial(cnn, norm="group"), _CNN),
    "cnn-bn": _Entry(partial(cnn, norm="batch"), _CNN),
    "cnn-cifar100": _Entry(partial(cnn, filters=(64, 64), hidden=(384, 192)), _CNN),  # as in the papers
    "resnet": _Entry(_resnet, _SMALL, "resnet:20"),
    "resnet-bn": _Entry(partial(_resnet, batch=True), _SMALL, "resnet-bn:20"),
    "resnet18": _Entry(resnet18, _LARGE),
    "gru": _Entry(gru, partial(check_token_shape, "gru"), "gru:256,256", every=True),
    "transformer": _Entry(transformer, partial(check_token_shape, "transformer"), "transformer:64,2", every=True),
}


def available() -> tuple[str, ...]:
    """Return the names known to `build_model`."""
    return tuple(sorted(_BUILDERS))


def build_model(name: str, num_classes: int, input_shape: Shape, *, every: bool = False) -> Model:
    """Build the model registered under `name`; in ``"mlp:128,64"``, the numbers are the hidden widths.

    Args:
      name: registered name; for some models, numbers can follow.
      num_classes: number of classes K.
      input_shape: shape of one example.
      every: whether to predict at each position of a sequence, for next-token prediction.

    Raises:
      JaxpflError: if the name is unknown, if the model does not accept these numbers or this input shape, or if
        ``every`` is true and the model does not support it.
    """
    base, colon, argument = name.partition(":")
    if base not in _BUILDERS:
        raise unknown_name("model", base, _BUILDERS)
    entry = _BUILDERS[base]
    if colon and entry.example is None:
        examples = ", ".join(repr(other.example) for other in _BUILDERS.values() if other.example)
        raise JaxpflError(f"model {base!r} takes no numbers, got {shown(name)} (with numbers: {examples})")
    if every and not entry.every:
        able = " or ".join(other for other, entry in _BUILDERS.items() if entry.every)
        raise JaxpflError(f"the task 'next-token' requires a model with a label per token, got {base!r}: use {able}")
    entry.check(tuple(input_shape))
    build = partial(entry.build, every=True) if every else entry.build
    if not colon:
        return build(num_classes)
    try:
        numbers = tuple(int(number) for number in argument.split(","))
    except ValueError:
        raise JaxpflError(f"model {base!r} takes integers as in {entry.example!r}, got {shown(name)}") from None
    return build(num_classes, numbers)
