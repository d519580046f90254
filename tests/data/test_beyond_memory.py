"""A federation larger than the memory that a process may take: read, split, saved, opened and trained.

The limit is ``RLIMIT_DATA``, on memory of the process's own. ``RLIMIT_AS`` (``ulimit -v``) counts memory-mapped files
too, of which memory holds no more than the system has room for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MIB = 2**20
CHILD = """
import json, resource, sys
from pathlib import Path
import numpy as np
import jaxpfl
from jaxpfl import data
from jaxpfl.engine.streamed import rounds

rounds._BYTES = 8 * 2**20  # scaled down as the limit is: clients are scored in blocks, and a few are held at once
name, folder, spare, in_files = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
plan = jaxpfl.ExecutionPlan(clients_in="disk", devices=1)
given = dict(rounds=2, cohort=5, local_steps=2, batch_size=10, model="linear")
small = [(np.ones((20, 60)), np.arange(20) % 5)] * 6
jaxpfl.fit("fedavg", jaxpfl.stack_clients(small, small), **given, plan=plan)  # what the libraries themselves take

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + spare
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
source = data.load(name, str(folder), in_files=in_files)
federation = data.federate(source, partition="natural", test_share=0.2)
jaxpfl.save_federation(federation, folder / "made", source=source)
del source, federation
federation = jaxpfl.open_federation(folder / "made", check=True)
fitted = jaxpfl.fit("fedavg", federation, **given, plan=plan)
size = sum(path.stat().st_size for path in (folder / "made").iterdir())
print(json.dumps([federation.num_clients, size, float(fitted.personalized_accuracy.mean())]))
"""


def in_child(name: str, folder: Path, spare: int, in_files: bool) -> tuple[Any, str]:
    command = [sys.executable, "-c", CHILD, name, str(folder), str(spare), str(in_files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None, done.stderr


@pytest.mark.slow
def test_an_archive_larger_than_the_limit(tmp_path: Path) -> None:
    clients, each, spare = 9000, 200, 224 * MIB
    rng = np.random.default_rng(0)
    y = rng.integers(5, size=clients * each).astype(np.int8)
    some = rng.standard_normal((10_000, 60)).astype(np.float32)
    x = np.resize(some, (clients * each, 60))
    users = np.repeat(np.arange(clients, dtype=np.int16), each)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, users_train=users)
    size = x.nbytes
    del x
    assert size > 1.8 * spare
    found, said = in_child("npz:a.npz", tmp_path, spare, True)
    assert found is not None, said
    assert found[0] == clients
    assert found[1] > size
    found, said = in_child("npz:a.npz", tmp_path, spare, False)
    assert found is None
    assert "of memory" in said.splitlines()[-1]
