"""Models: pure functions of one client's parameters and a batch of inputs.

>>> import jax
>>> model = build_model("mlp:128,64", num_classes=10, input_shape=(28, 28, 1))
>>> x = jax.numpy.zeros((5, 28, 28, 1))
>>> params = jax.jit(model.init)(jax.random.key(0), x)
>>> model.apply(params, x).shape
(5, 10)
"""

from jaxpfl.models.base import (
    CLASSIFICATION_METRICS,
    Model,
    PerExample,
    Task,
    as_model,
    classification,
    correct,
    cross_entropy,
    from_linen,
)
from jaxpfl.models.cnn import CNN, cnn, cnn_cifar100, cnn_gn
from jaxpfl.models.gru import GRU, gru
from jaxpfl.models.linear import Linear, linear
from jaxpfl.models.mlp import MLP, mlp, mlp_ln
from jaxpfl.models.normalisation import GroupNorm, LayerNorm
from jaxpfl.models.registry import available, build_model
from jaxpfl.models.resnet import ResNet, resnet, resnet18

__all__ = [
    "CLASSIFICATION_METRICS",
    "CNN",
    "GRU",
    "MLP",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Model",
    "PerExample",
    "ResNet",
    "Task",
    "as_model",
    "available",
    "build_model",
    "classification",
    "cnn",
    "cnn_cifar100",
    "cnn_gn",
    "correct",
    "cross_entropy",
    "from_linen",
    "gru",
    "linear",
    "mlp",
    "mlp_ln",
    "resnet",
    "resnet18",
]
