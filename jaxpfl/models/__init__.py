"""Models: pure functions of one client's parameters and a batch of inputs.

>>> model = build_model("mlp:128,64", num_classes=10, input_shape=(28, 28, 1))
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.models.base import (
    CLASSIFICATION_METRICS,
    HeadPredicate,
    Model,
    PerExample,
    Task,
    as_model,
    classification,
    correct,
    cross_entropy,
    from_linen,
)
from jaxpfl.models.cnn import CNN, check_image_shape, cnn, cnn_cifar100
from jaxpfl.models.linear import Linear, linear
from jaxpfl.models.mlp import MLP, mlp

__all__ = [
    "CLASSIFICATION_METRICS",
    "CNN",
    "MLP",
    "HeadPredicate",
    "Linear",
    "Model",
    "PerExample",
    "Task",
    "as_model",
    "available",
    "build_model",
    "classification",
    "cnn",
    "cnn_cifar100",
    "correct",
    "cross_entropy",
    "from_linen",
    "linear",
    "mlp",
]


def _images(build: Callable[[int], Model]) -> Callable[[int, tuple[int, ...]], Model]:
    """A builder that checks the input shape at once, not when the first batch is traced."""

    def checked(num_classes: int, input_shape: tuple[int, ...]) -> Model:
        check_image_shape(input_shape, convolutions=2)
        return build(num_classes)

    return checked


_BUILDERS: dict[str, Callable[[int, tuple[int, ...]], Model]] = {
    "linear": lambda num_classes, input_shape: linear(num_classes),
    "mlp": lambda num_classes, input_shape: mlp(num_classes),
    "mlp-persfl": lambda num_classes, input_shape: mlp(num_classes, hidden=(100,)),
    "cnn": _images(cnn),
    "cnn-cifar100": _images(cnn_cifar100),
}


def available() -> tuple[str, ...]:
    """The names that `build_model` knows."""
    return tuple(sorted(_BUILDERS))


def build_model(name: str, num_classes: int, input_shape: tuple[int, ...]) -> Model:
    """The model registered under `name`; ``"mlp:128,64"`` gives a perceptron its hidden widths.

    Raises JaxpflError for an unknown name, widths that are no positive integers, or inputs too small.
    """
    base, colon, argument = name.partition(":")
    if base not in _BUILDERS:
        raise unknown_name("model", base, _BUILDERS)
    if not colon:
        return _BUILDERS[base](num_classes, tuple(input_shape))
    if base != "mlp":
        raise JaxpflError(f"model {base!r} takes no argument, got {name!r} (only 'mlp' does: 'mlp:128,64')")
    try:
        hidden = tuple(int(width) for width in argument.split(","))
    except ValueError:
        raise JaxpflError(f"hidden widths are integers as in 'mlp:128,64', got {name!r}") from None
    return mlp(num_classes, hidden)
