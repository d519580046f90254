"""Token counts from text larger than the memory that a process may take, with the numbers of their own tally.

The limit is ``RLIMIT_DATA``, as in ``test_beyond_memory.py``. The same reader fails under it if it holds all that it
has read: the text is not small beside the limit, nor the limit too large to tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 2**20
CHILD = """
import json, resource, sys
from pathlib import Path
import numpy as np
from jaxpfl.data.sources import token_counts

folder, spare, held = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "held"
if held:  # all entries stay in memory
    token_counts._ROWS = 2**62
read = token_counts.read_counts_csv
read(folder / "small")  # what the libraries themselves take
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + spare
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
found = read(folder / "large")
sums = np.bincount(found.indices, found.counts).astype(int).tolist()
totals = {word: total for word, total in zip(found.vocabulary.tolist(), sums) if total}
print(json.dumps([len(found.users), len(found.counts), totals]))
"""


def in_child(folder: Path, spare: int, how: str = "one at a time") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(spare), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def check(folder: Path, spare: int, users: int, entries: int, totals: dict[str, int]) -> None:
    done = in_child(folder, spare)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [users, entries, totals]
    held = in_child(folder, spare, "held")
    assert held.returncode != 0
    assert "memory" in held.stderr.splitlines()[-1].lower()


@pytest.mark.slow
def test_rows_of_a_table(tmp_path: Path) -> None:
    users, words, spare = 20_000, 40, 64 * MIB
    counts = np.random.default_rng(0).integers(1, 200, (words, users))
    for name, some in (("small", 10), ("large", users)):
        with open(tmp_path / name, "w") as file:
            file.write("user,token,count\n")
            # Token by token: a user's rows lie all over the file.
            for word in range(words):
                file.writelines(f"{'of a long name ' * 7}{u},word {word},{counts[word, u]}\n" for u in range(some))
    assert (tmp_path / "large").stat().st_size > 1.1 * spare
    totals = {f"word {word}": int(counts[word].sum()) for word in range(words)}
    check(tmp_path, spare, users, users * words, totals)
