"""Models: pure functions of one client's parameters and a batch of inputs.

Examples:
  >>> import jax
  >>> model = build_model("mlp:128,64", num_classes=10, input_shape=(28, 28, 1))
  >>> x = jax.numpy.zeros((5, 28, 28, 1))
  >>> params = jax.jit(model.init)(jax.random.key(0), x)
  >>> model.apply(params, x).shape
  (5, 10)
"""

from jaxpfl.models.adapters import lora
from jaxpfl.models.base import (
    CLASSIFICATION_METRICS,
    TASKS,
    Model,
    Task,
    as_model,
    classification,
    correct,
    cross_entropy,
    from_equinox,
    from_linen,
    from_nnx,
    in_bfloat16,
)
from jaxpfl.models.images import (
    CNN,
    MLP,
    Linear,
    ResNet,
    cnn,
    cnn_cifar100,
    cnn_gn,
    linear,
    mlp,
    mlp_ln,
    resnet,
    resnet18,
)
from jaxpfl.models.layers import GroupNorm, LayerNorm
from jaxpfl.models.losses import LOSSES, PerExample
from jaxpfl.models.metrics import Metric, PerClient, Pooled, auc, calibration_error, macro_f1, per_client
from jaxpfl.models.registry import available, build_model
from jaxpfl.models.sequences import GRU, Transformer, gru, transformer

__all__ = [
    "CLASSIFICATION_METRICS",
    "CNN",
    "GRU",
    "LOSSES",
    "MLP",
    "TASKS",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Metric",
    "Model",
    "PerClient",
    "PerExample",
    "Pooled",
    "ResNet",
    "Task",
    "Transformer",
    "as_model",
    "auc",
    "available",
    "build_model",
    "calibration_error",
    "classification",
    "cnn",
    "cnn_cifar100",
    "cnn_gn",
    "correct",
    "cross_entropy",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "gru",
    "in_bfloat16",
    "linear",
    "lora",
    "macro_f1",
    "mlp",
    "mlp_ln",
    "per_client",
    "resnet",
    "resnet18",
    "transformer",
]
