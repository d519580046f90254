"""A user's own modules compared with the built-in models, by time and by share of the peak FLOP/s.

    python -m benchmarks own_models --json own_models.json

FedAvg rounds are timed in turn, with one process for each contender. LeNet is the built-in ``cnn`` as a user would
write it in flax.linen and flax.nnx. ResNet-8 is the built-in ``resnet``. The transformer has pre-norm blocks on patches
of 4 x 4 pixels (embedded by its only convolution) and no built-in counterpart. Convolutions are computed as matrix
products or in their plain form. The number of floating-point operations is three times the number in the plain module's
forward pass, counted in its program: a backward pass costs twice as much as a forward pass, except that the first
layer's input needs no gradient. The peak is measured by a matrix product in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import Problem, make_federation, rounds_of, simulate, use_devices
from .record import command, parser, positive, table, target, write
from .roofline import jax_product
from .worker import Contender

ASKED = target(1.3, 1.1)  # maximum ratio of an own LeNet's round to the built-in model's
PEAK = 1024
BUILT_IN = {"LeNet": "cnn", "ResNet-8": "resnet:8"}
OWN = ("LeNet linen", "LeNet nnx", "ResNet-8 linen", "transformer linen")


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("own_models", __doc__)
    options.add_argument("--clients", type=positive, default=20)
    options.add_argument("--steps", type=positive, default=10)
    args = options.parse_args(argv)
    problem = Problem(clients=args.clients, steps=args.steps, source="digits")
    product, repetitions = PEAK, args.repetitions
    if args.quick:
        problem, product, repetitions = replace(problem, clients=2, steps=1, batch=2), 64, 1
    jobs = {"peak": Job("own_models", {"product": product})}
    names = (*BUILT_IN.values(), *OWN)
    for name in names if not args.quick else ("cnn", "LeNet linen", "LeNet nnx"):
        # Residual networks take much longer, so all contenders that are compared with each other have fewer clients.
        smaller = {} if name.startswith(("LeNet", "cnn")) else {"clients": max(2, args.clients // 5)}
        for form in ("products", "plain") if name in OWN else ("products",):
            given = {"problem": asdict(replace(problem, **smaller)), "model": name, "form": form}
            jobs[name if name not in OWN else f"{name}, {form}"] = Job("own_models", given)
    results = compare(jobs, repetitions=repetitions)
    peak = 2 * product**3 * results["peak"]["facts"]["device"]["count"] / results["peak"]["median"]
    summary = {"peak_flops": peak, "contenders": _summary(results, jobs, peak)}
    _report(results, summary)
    settings = {"problem": asdict(problem), "product": product, "repetitions": repetitions}
    settings["problem"].pop("data_dir")
    write(args.json, "own_models", settings, results, summary=summary, asked=ASKED)


def _summary(results: dict[str, Any], jobs: dict[str, Job], peak: float) -> dict[str, Any]:
    """Return each contender's time relative to the built-in model and to its plain form, and its share of the peak."""
    summary = {}
    for name, row in results.items():
        if name == "peak":
            continue
        base, _, form = name.partition(", ")
        steps = Problem(**jobs[name].settings["problem"]).client_steps
        rate = row["facts"]["flops"] * steps / row["median"]
        built_in = results.get(BUILT_IN.get(base.split()[0], ""))
        summary[name] = {
            "over_built_in": built_in and row["median"] / built_in["median"],
            "over_plain": row["median"] / results[f"{base}, plain"]["median"] if form else None,
            "flops_per_second": rate,
            "share": rate / peak,
        }
    return summary


def _report(results: dict[str, Any], summary: dict[str, Any]) -> None:
    rows = []
    for name, row in summary["contenders"].items():
        asked = tuple(ASKED.values())[:2] if name.startswith("LeNet") and "products" in name else (None, None)
        figures = (row["over_built_in"], row["over_plain"], row["flops_per_second"] / 1e9, row["share"])
        rows.append((name, results[name]["median"], *figures, *asked))
    columns = ("", "s a round", "x built-in", "x plain", "GFLOP/s", "of the peak", "at most", "aim")
    table(f"own models against a peak of {summary['peak_flops'] / 1e9:.0f} GFLOP/s", columns, rows)


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds of one model, or the product that measures the peak."""
    use_devices()
    if "product" in settings:
        return jax_product(settings["product"])
    from jaxpfl import ExecutionPlan

    name, problem = settings["model"], Problem(**settings["problem"])
    model, plan = _model(name), ExecutionPlan(convolutions=settings["form"])
    contender = rounds_of(simulate(problem, plan=plan, model=model))
    counted = _model(
        {built: own for own, built in (("LeNet linen", "cnn"), ("ResNet-8 linen", "resnet:8"))}.get(name, name)
    )
    flops = 3 * forward_flops(counted, make_federation(problem).input_shape) * problem.batch
    return contender._replace(facts=lambda: {"flops": flops} | contender.facts())


def _model(name: str) -> Any:
    """Return a model by name: a built-in one as a string, others as modules."""
    if name == "LeNet linen":
        from .round_cnn import naive_cnn

        return naive_cnn()
    return {"LeNet nnx": lenet_nnx, "ResNet-8 linen": resnet8, "transformer linen": transformer}.get(
        name, lambda: name
    )()


def lenet_nnx() -> Any:
    """Return the papers' CNN in flax.nnx."""
    from flax import nnx

    from jaxpfl import from_nnx

    class LeNet(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv0 = nnx.Conv(1, 6, (5, 5), padding="VALID", rngs=rngs)
            self.conv1 = nnx.Conv(6, 16, (5, 5), padding="VALID", rngs=rngs)
            self.dense0 = nnx.Linear(256, 120, rngs=rngs)
            self.dense1 = nnx.Linear(120, 84, rngs=rngs)
            self.head = nnx.Linear(84, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for conv in (self.conv0, self.conv1):
                x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), (2, 2))
            x = x.reshape(x.shape[0], -1)
            return self.head(nnx.relu(self.dense1(nnx.relu(self.dense0(x)))))

    return from_nnx(LeNet)


def resnet8() -> Any:
    """Return ResNet-8 for CIFAR with group normalization, made of flax's layers like the built-in one."""
    import flax.linen as nn

    class Block(nn.Module):
        features: int
        stride: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            def conv(size: int, stride: int) -> nn.Module:
                return nn.Conv(self.features, (size, size), strides=stride, use_bias=False)

            y = nn.relu(nn.GroupNorm(2)(conv(3, self.stride)(x)))
            y = nn.GroupNorm(2)(conv(3, 1)(y))
            if x.shape != y.shape:
                x = nn.GroupNorm(2)(conv(1, self.stride)(x))
            return nn.relu(x + y)

    class ResNet8(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.GroupNorm(2)(nn.Conv(16, (3, 3), use_bias=False)(x)))
            for features, stride in ((16, 1), (32, 2), (64, 2)):
                x = Block(features, stride)(x)
            return nn.Dense(10)(x.mean(axis=(1, 2)))

    return ResNet8()


def transformer(width: int = 64, blocks: int = 2, heads: int = 4) -> Any:
    """Return a pre-norm transformer on patches of 4 x 4 pixels."""
    import flax.linen as nn

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(width, (4, 4), strides=4, padding="VALID", name="embed")(x)
            x = x.reshape(x.shape[0], -1, width)
            x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
            for _ in range(blocks):
                x = x + nn.MultiHeadDotProductAttention(heads)(nn.LayerNorm()(x))
                x = x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
            return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=1))

    return Transformer()


def forward_flops(model: Any, input_shape: tuple[int, ...]) -> float:
    """Count the operations of products and convolutions in a forward pass of one example."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.models import as_model

    pair = as_model(model)
    x = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
    params = jax.eval_shape(pair.init, jax.random.key(0), x)
    program = jax.make_jaxpr(lambda params, x: pair.apply(params, x, key=None, train=False))(params, x)
    return float(sum(_flops(program.jaxpr)))


def _flops(jaxpr: Any) -> Iterator[float]:
    for eqn in jaxpr.eqns:
        of: Callable[..., float] | None = {"dot_general": _of_product, "conv_general_dilated": _of_conv}.get(
            eqn.primitive.name
        )
        if of is not None:
            yield 2.0 * math.prod(eqn.outvars[0].aval.shape) * of(eqn)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _flops(inner)


def _of_product(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)


def _of_conv(eqn: Any) -> float:
    kernel, of = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    return math.prod(kernel) / kernel[of[0]]


if __name__ == "__main__":
    main()
