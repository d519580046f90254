"""Low-rank adapters on a small transformer: bytes and scores, depending on the shared and the personal parts.

    python -m benchmarks adapters --json FILE

The data are source files of Python's standard library. Each client has the bytes of one module, cut into windows of 32
for next-token prediction. Half of the clients train the base model with FedAvg. The other half start from the base
model, and share or personalize different parts. The score is computed on the last fifth of each module's windows, with
the model with which the client predicts. The learning rate of each setup is chosen from a grid on validation windows,
with one seed. Scores are means over clients and over three seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package

from .problems import use_devices
from .record import command, parser, table, write

MODULES = (
    "argparse", "ast", "bdb", "calendar", "codecs", "configparser", "datetime", "difflib", "dis", "enum", "ftplib",
    "functools", "inspect", "mailbox", "optparse", "tarfile",
)  # fmt: skip
BYTES, WINDOW = 16_000, 32
MODEL, RANK, BLOCKS = "transformer:32,1", 4, "block*/kernel"
RATES = (0.3, 1.0, 3.0)
ROUNDS, BASE_ROUNDS, STEPS, BATCH = 12, 30, 10, 16


class Way(NamedTuple):
    """A method and its model: the whole model, or adapters (`lora`), possibly with fully trained or personal parts."""

    method: str
    adapted: bool = True
    trained: str = ""
    personal: str = ""


WAYS: Mapping[str, Way] = {
    "all parameters shared": Way("fedavg", adapted=False),
    "adapters shared": Way("fedavg"),
    "adapters personal": Way("local"),
    "body shared, adapters personal": Way("fedper", trained="embedding/*,norm/*,head/*", personal="adapters/*"),
}


@command
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    from jaxpfl.runs import compile_cache

    use_devices()
    compile_cache.enable()
    rounds, base_rounds, seeds = (1, 1, 1) if args.quick else (ROUNDS, BASE_ROUNDS, 3)
    federations = federations_of(MODULES[:6] if args.quick else MODULES)
    start = time.process_time()
    base, results = _base(federations[0], base_rounds), {}
    results["base"] = _scores([_fit(WAYS["all parameters shared"], base, federations[1], 1e-12, 1, 0)])
    for name in args.way or (list(WAYS)[1:2] if args.quick else WAYS):
        results[name] = found = _chosen(WAYS[name], base, federations[1], rounds, seeds, args.quick)
        print(f"{name}: {found['accuracy']:.4f}, {found['perplexity']:.3f} at {found['rate']:g}", flush=True)
    settings = {
        "model": MODEL, "rank": RANK, "window": WINDOW, "rounds": rounds, "base_rounds": base_rounds, "steps": STEPS,
        "batch": BATCH, "rates": RATES, "seeds": seeds, "clients": federations[1].num_clients,
    }  # fmt: skip
    results["cpu_seconds"] = time.process_time() - start
    _show(results)
    write(args.json, "adapters", settings, results)


def _parser() -> argparse.ArgumentParser:
    options = parser("adapters", __doc__)
    options.add_argument("--way", action="append", choices=WAYS, help="setup to run; may be repeated; all by default")
    return options


def federations_of(modules: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the federation that trains the base model, and the federation that starts from this model."""
    import sysconfig

    import jaxpfl

    library, parts = Path(sysconfig.get_path("stdlib")), []
    for first in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            for name in modules[first::2]:
                text = (library / f"{name}.py").read_text(encoding="utf-8")[:BYTES]
                (Path(folder) / name).write_text(text, encoding="utf-8")
            source = jaxpfl.load(f"text:{folder}", window=WINDOW)
            parts.append(jaxpfl.federate(source, partition="natural", test_share=0.2, validation_share=0.2))
    return parts[0], parts[1]


def _base(federation: Any, rounds: int) -> Any:
    """Return the parameters of FedAvg's global model."""
    import jax

    import jaxpfl

    result = jaxpfl.fit(
        "fedavg", federation, model=MODEL, task="next-token", num_classes=256, rounds=rounds, local_steps=STEPS,
        batch_size=BATCH, lr=1.0, eval_every=rounds, seeds=[100],
    )  # fmt: skip
    return jax.tree.map(lambda leaf: leaf[0], result.state.server)


def _model(way: Way, base: Any) -> Any:
    from jaxpfl.models import build_model, lora

    whole = build_model(MODEL, 256, (WINDOW,), every=True)
    if not way.adapted:
        return whole
    return lora(whole, base, rank=RANK, at=BLOCKS, trained=way.trained, personal=way.personal)


def _fit(way: Way, base: Any, federation: Any, rate: float, rounds: int, seed: int) -> Any:
    import jaxpfl

    return jaxpfl.fit(
        way.method, federation, model=_model(way, base), task="next-token", num_classes=256, rounds=rounds,
        local_steps=STEPS, batch_size=BATCH, lr=rate, eval_every=rounds, seeds=[seed],
        warm_start=None if way.adapted else base,
    )  # fmt: skip


def _scores(results: list[Any]) -> dict[str, Any]:
    each = {name: [float(one.mean(name)[0]) for one in results] for name in ("accuracy", "perplexity")}
    return {name: sum(values) / len(values) for name, values in each.items()} | {"each": each}


def _chosen(way: Way, base: Any, federation: Any, rounds: int, seeds: int, quick: bool) -> dict[str, Any]:
    """Return the scores at the rate with the best validation accuracy, which is chosen with the first seed."""
    import numpy as np

    from jaxpfl import METHODS
    from jaxpfl.engine.build import simulation_of
    from jaxpfl.engine.spec import RunSpec

    first = {rate: _fit(way, base, federation, rate, rounds, 0) for rate in (RATES[:1] if quick else RATES)}
    tried = {rate: float(np.nanmean(result.validation_score)) for rate, result in first.items()}
    rate = max(tried, key=lambda one: tried[one] if np.isfinite(tried[one]) else -1)
    spec = RunSpec(
        method=METHODS[way.method],
        model=_model(way, base),
        task="next-token",
        rounds=rounds,
        local_steps=STEPS,
        num_classes=256,
    )
    up, down = simulation_of(spec, federation).bytes_per_client()
    runs = [first[rate], *(_fit(way, base, federation, rate, rounds, seed) for seed in range(1, seeds))]
    return _scores(runs) | {"rate": rate, "tried": list(tried.items()), "up": int(up), "down": int(down)}


def _show(results: dict[str, Any]) -> None:
    rows = [
        [
            name,
            *(_kilo(row.get(way, 0)) for way in ("up", "down")),
            f"{100 * row['accuracy']:.1f} %",
            f"{row['perplexity']:.2f}",
            f"{row['rate']:g}" if "rate" in row else "-",
        ]
        for name, row in results.items()
        if isinstance(row, dict)
    ]
    table("adapters on a small transformer", ["", "up", "down", "accuracy", "perplexity", "rate"], rows)


def _kilo(count: int) -> str:
    return f"{count / 1000:.1f} kB"


if __name__ == "__main__":
    main()
