"""One process of a group: runs a list of cases and stores what each gives (see `process_group.run_cases`)."""

import os
import pickle
import sys
import traceback
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# Small programs that run for milliseconds, as in the default tests (tests/conftest.py says why).
flags = ["backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    flags += ["cpu_use_fusion_emitters=false", "cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join(f"--xla_{flag}" for flag in flags)


def share_programs(folder: str) -> None:
    """Has process 0 compile for all, which trace for themselves: a program that they trace otherwise is an error."""
    import jax
    from jax._src import cache_key

    # It tells the processes of a host apart, so that none would find what another compiled.
    assert callable(cache_key._hash_accelerator_config)
    cache_key._hash_accelerator_config = lambda *_: None
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_share_binary_between_hosts", True)
    jax.config.update("jax_share_binary_between_hosts_timeout_ms", 300_000)


def main(address: str, count: int, number: int, devices: int, out: str, names: list[str]) -> None:
    import jax

    from jaxpfl.support import distributed, processes

    if count > 1:
        share_programs(f"{out}-programs")
        distributed.start(address, count, number, cpu_devices=devices)
    else:
        jax.config.update("jax_num_cpu_devices", devices)
    import process_cases

    found = {}
    for name in names:
        try:
            found[name] = process_cases.CASES[name]()
        except Exception:
            found[name] = traceback.format_exc()
    everyones = processes.exchange({name: value for name, value in found.items() if isinstance(value, str)})
    if processes.is_first():
        failed = {name: f"process {i}: {said}" for i, own in enumerate(everyones) for name, said in own.items()}
        Path(out).write_bytes(pickle.dumps(found | failed))


if __name__ == "__main__":
    address, count, number, devices, out, *names = sys.argv[1:]
    main(address, int(count), int(number), int(devices), out, names)
