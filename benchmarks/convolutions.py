"""A round of a CNN compiled for a GPU: convolutions as products of patches, compared with kernels without patches.

    python -m benchmarks convolutions

As in ``kernels``, XLA compiles for an H200 that is only described, and does not tune the products. This needs JAX's
CUDA plugin, but no GPU. All clients take part in a round of FedAvg with the papers' CNN. ``launches`` are counted as in
``kernels``. ``GB`` are the sizes of what the operations of a round read and write; caches and repeated reads are left
out, and so is the arithmetic: the counts do not predict times, which ``gpu`` measures. ``GB temporary`` is the memory
that XLA reserves for intermediate results.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, JobError, once
from .kernels import H200, SETTINGS, UNTUNED, compile_for_target, launches, moved
from .problems import Problem, simulate
from .record import command, parser, positive, table, write

FORMS = "products", "kernel"
"""Values of ``plan.convolutions``."""


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("convolutions", __doc__, repetitions=1)
    options.add_argument("--clients", type=positive, default=1000, metavar="M")
    args = options.parse_args(argv)
    if not any(plugin.name.startswith("xla_cuda") for plugin in entry_points(group="jax_plugins")):
        raise JobError("JAX's CUDA plugin is missing: pip install 'jax[cuda12]' (no GPU is needed)")
    clients = 4 if args.quick else args.clients
    problem = SETTINGS | {"clients": clients, "cohort": clients, "cap": 60}
    results = {form: once(Job("convolutions", {"form": form, "problem": problem})) for form in FORMS}
    rows = [(form, row["launches"], row["gb"], row["temporary_gb"], row["seconds"]) for form, row in results.items()]
    headings = "convolutions", "launches", "GB", "GB temporary", "CPU s to compile"
    table(f"a round of FedAvg, {clients} clients, on an H200", headings, rows)
    write(args.json, "convolutions", problem | {"target": H200, "options": UNTUNED}, results)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Compile a round; return its launches, bytes, and CPU seconds of compilation."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jaxpfl import ExecutionPlan

    plan = ExecutionPlan(devices=1, tuning="quick", convolutions=settings["form"])
    programs, given = simulate(Problem(**settings["problem"]), plan=plan)._on("cuda", 1)
    options = UNTUNED | programs.execution.compiler_options["compiler_options"]
    compiled, seconds = compile_for_target(programs.function("advance", programs.execution.block), given, options)
    text, temporary = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
    found = {"launches": launches(text, in_loops=True), "gb": moved(text, in_loops=True) / 1e9}
    triton = text.count('custom_call_target="__gpu$xla.gpu.triton"')
    return found | {"temporary_gb": temporary / 1e9, "pallas_kernels": triton, "seconds": seconds}


if __name__ == "__main__":
    main()
