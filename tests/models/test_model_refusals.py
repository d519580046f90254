"""What no model, task or metric can be made of is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.models import build_model, classification, lora
from jaxpfl.models.base import leaves_by_path, start_from
from jaxpfl.models.losses import resolve
from jaxpfl.models.metrics import parse_metrics, task_metric

MLP = build_model("mlp:5", 3, (4,))


def built(name: str, *shape: int) -> Callable[[], Any]:
    return lambda: build_model(name, 10, shape)


def started(**change: Any) -> Callable[[], Any]:
    def start() -> Any:
        task = classification(MLP, (4,), 3)
        given = leaves_by_path(task.init(jax.random.key(0))) | {path.replace("_", "/"): a for path, a in change.items()}
        return start_from(task, {path: value for path, value in given.items() if value is not None})

    return start


def adapted(**options: Any) -> Callable[[], Any]:
    return lambda: lora(MLP, MLP.init(jax.random.key(0), jnp.zeros((1, 4))), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (built("cn", 28, 28), "did you mean 'cnn'"),
        (built("mlp:a", 28, 28), "takes integers as in 'mlp:128,64', got 'mlp:a'"),
        (built("mlp:12,-3", 28, 28), "hidden widths must be one or more positive"),
        (built("mlp-ln:0", 28, 28), "hidden widths must be one or more positive"),
        (built("cnn:3", 28, 28), "model 'cnn' takes no numbers, got 'cnn:3'"),
        (built("cnn", 8, 8), r"16 x 16, got \(8, 8\)"),
        (lambda: build_model("cnn", 10, (16, 16)).init(jax.random.key(0), jnp.zeros((1, 15, 16))), r"got \(15, 16\)"),
        (built("resnet", 80), r"requires images .* 4 x 4, got \(80,\)"),
        (built("resnet18", 7, 8, 3), r"8 x 8, got \(7, 8, 3\)"),
        (built("resnet:18", 8, 8), r"6 n \+ 2 layers .* got 18; see also 'resnet18'"),
        (built("resnet:8,8", 8, 8), "one number, its depth, got 8,8"),
        (built("gru", 28, 28, 1), r"sequences of tokens \[T\], got inputs of shape \(28, 28, 1\)"),
        (built("gru", 0), r"shape \(0,\)"),
        (built("gru:0", 80), "must be one or more positive"),
        (built("transformer:8", 6), "width,blocks or width,blocks,heads; .* got 8"),
        (built("transformer:8,0", 6), "got 8,0"),
        (built("transformer:10,1", 6), "multiple of twice the heads .by default 4., got 10,1"),
        (lambda: build_model("mlp", 10, (6,), every=True), "'mlp' predicts one label; next-token requires .* gru or"),
        (lambda: classification(build_model("gru", 10, (80,)), (80,), 10), "reads tokens, so inputs must be integers"),
        (started(dense0_kernel=np.zeros((4, 6))), r"'dense0/kernel' is \(4, 6\) in them but \(4, 5\) in the model"),
        (started(head_scale=np.zeros(3)), r"'head/scale' is \(3,\) in them but absent in the model"),
        (started(head_bias=None), r"'head/bias' is absent in them but \(3,\) in the model"),
        (started(head_bias=np.full(3, 1e300)), "must be finite, but 'head/bias' contains a NaN or infinite"),
        (started(head_bias=np.array(list("abc"))), "must be numbers, but 'head/bias' is <U1"),
        (adapted(rank=0), "lora: the rank must be >= 1, got 0"),
        (adapted(at="dense1/*"), r"no parameter matches at='dense1/\*' \(available: dense0/kernel, head/kernel\)"),
        (adapted(trained="tail/*"), r"no parameter matches trained='tail/\*'"),
        (adapted(at="head/*", personal="trained/*"), "available: adapters/head/kernel/a, adapters/head/kernel/b"),
        (lambda: resolve("huber:delta=0"), "huber:delta must be > 0, got 0"),
        (lambda: resolve("quantile:q=1"), "quantile:q must be > 0 and < 1, got 1"),
        (lambda: resolve("quantile:p=0.5"), "unknown argument of loss quantile 'p'"),
        (lambda: resolve("squared:q=0.5"), "unknown argument of loss squared 'q' .known: none"),
        (lambda: resolve("squarred"), "unknown loss 'squarred': did you mean 'squared'"),
        (lambda: parse_metrics("acuracy"), "unknown metric 'acuracy': did you mean 'accuracy'"),
        (lambda: parse_metrics("auc,"), "metrics must be names separated by commas, got 'auc,'"),
        (lambda: task_metric("auc", "regression", "ab"), r"classes, or labels 0 and 1 \(task .*metrics are a, b"),
        (lambda: task_metric("rmse", "binary", "ab"), r"rmse requires numeric labels \(task regression\), but this"),
        (
            lambda: task_metric("perplexity", "classification", "ab"),
            r"requires a label at each position \(task next-token\)",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(JaxpflError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
