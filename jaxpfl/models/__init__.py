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
    TASKS,
    Model,
    Task,
    as_model,
    classification,
    correct,
    from_equinox,
    from_linen,
    from_nnx,
    in_bfloat16,
)
from jaxpfl.models.metrics import PerClient, PerExample, Pooled, per_client
from jaxpfl.models.registry import available, build_model

__all__ = [
    "TASKS",
    "Model",
    "PerClient",
    "PerExample",
    "Pooled",
    "Task",
    "as_model",
    "available",
    "build_model",
    "classification",
    "correct",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "in_bfloat16",
    "lora",
    "per_client",
]
