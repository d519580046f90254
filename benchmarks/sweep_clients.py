"""One command, ``jaxpfl sweep``, over 10 to a million linear clients.

    python -m benchmarks sweep_clients

The task is logistic regression on planted clients (four features, five examples each), with all clients in each of ten
rounds of ten steps. The command runs in a new process with an empty cache. The results are its seconds, the number of
programs that it trained, its peak memory, and the seconds, compile seconds and scores for each number of clients.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import JobError
from .record import command, parser, positive, table, write

COUNTS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
QUICK = (10, 30)
DATA = "planted:examples=5,test_examples=5,dim=4"
GIB = 2**30


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("sweep_clients", __doc__, repetitions=1)
    options.add_argument("--counts", type=positive, nargs="+", metavar="M")
    options.add_argument("--rounds", type=positive, default=10)
    args = options.parse_args(argv)
    counts = args.counts or (QUICK if args.quick else COUNTS)
    given = ["fedavg", "--data", DATA, "--grid", f"clients={','.join(map(str, counts))}", "--grid", "cohort=1m"]
    given += ["--rounds", str(2 if args.quick else args.rounds), "--batch-size", "5", "--seeds", "1"]
    given += ["--select", "none"]
    with tempfile.TemporaryDirectory() as folder:
        said, seconds = _sweep(given, Path(folder))
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    rows: list[dict[str, Any]] = []
    for row in said["rows"]:
        found = {name: row["metrics"].get(name, {}).get("mean") for name in ("compile_seconds", "bytes_up")}
        score = row["personalized_accuracy"]["mean"]
        rows.append(
            {"clients": row["settings"]["clients"], "seconds": row["seconds"], "status": row["status"]}
            | {"reason": row["reason"], "personalized_accuracy": score}
            | found
        )
    columns = ("m", "s", "compile s", "bytes up", "accuracy", "status")
    names = ("seconds", "compile_seconds", "bytes_up", "personalized_accuracy", "status")
    table("jaxpfl sweep over client counts", columns, [(f"{r['clients']:,}", *(r[n] for n in names)) for r in rows])
    print(f"\n{seconds:.1f} s, {said['programs']} programs, {peak / GIB:.2f} GiB at most")
    more = {"seconds": seconds, "programs": said["programs"], "peak_bytes": peak}
    write(args.json, "sweep_clients", {"command": " ".join(["jaxpfl sweep", *given])}, rows, **more)


def _sweep(given: list[str], folder: Path) -> tuple[dict[str, Any], float]:
    """Run the command with its cache in a new folder, and return its summary and seconds."""
    call = [sys.executable, "-m", "jaxpfl.cli", "sweep", *given, "--output", str(folder / "sweep"), "--json"]
    began = time.perf_counter()
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise JobError(f"jaxpfl sweep failed: {' '.join(done.stderr.split())[-500:]}")
    return json.loads(done.stdout), time.perf_counter() - began


if __name__ == "__main__":
    main()
