"""Token counts from text larger than the memory that a process may take, with the numbers of their own tally.

The limit is ``RLIMIT_DATA``, as in ``test_beyond_memory.py``. The same reader fails under it if it holds all that it
has read: the text is not small beside the limit, nor the limit too large to tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

MIB = 2**20
CHILD = """
import json, resource, sys
from pathlib import Path
import numpy as np
from jaxpfl.data.sources import leaf_files, token_files

kind, folder, spare, held = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "held"
if held:  # all entries and all users stay in memory
    token_files._ROWS = 2**62
    one_by_one = leaf_files.Part.__iter__
    leaf_files.Part.__iter__ = lambda part: iter(list(one_by_one(part)))
read = {"csv": token_files.read_counts_csv, "leaf": token_files.read_leaf_counts}[kind]
read(folder / "small")  # what the libraries themselves take
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + spare
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
found = read(folder / "large")
sums = np.bincount(found.indices, found.counts).astype(int).tolist()
totals = {word: total for word, total in zip(found.vocabulary.tolist(), sums) if total}
print(json.dumps([len(found.users), len(found.counts), totals]))
"""


def in_child(kind: str, folder: Path, spare: int, how: str = "one at a time") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, kind, str(folder), str(spare), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def check(kind: str, folder: Path, spare: int, users: int, entries: int, totals: dict[str, int]) -> None:
    done = in_child(kind, folder, spare)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [users, entries, totals]
    held = in_child(kind, folder, spare, "held")
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
    check("csv", tmp_path, spare, users, users * words, totals)


@pytest.mark.slow
def test_users_of_leafs_reddit(tmp_path: Path) -> None:
    users, spare = 400, 32 * MIB
    rng, totals, entries = np.random.default_rng(0), Counter[str](), 0
    words = np.array([f"word-{i}" for i in range(300)])
    for name, some in (("small", 2), ("large", users)):
        (tmp_path / name / "train").mkdir(parents=True)
        with open(tmp_path / name / "train" / "all.json", "w") as file:
            file.write('{"user_data": {')
            for user in range(some):
                drawn = words[rng.integers(len(words), size=(350, 11))].tolist()
                own = {"x": [[row[:10]] for row in drawn], "y": [{"target_tokens": [row[1:]]} for row in drawn]}
                file.write(f'{", " if user else ""}"{user}": {json.dumps(own)}')
                if name == "large":
                    seen = Counter(word for row in drawn for word in row[1:])
                    totals, entries = totals + seen, entries + len(seen)
            file.write("}}")
    assert (tmp_path / "large" / "train" / "all.json").stat().st_size > 0.9 * spare
    check("leaf", tmp_path, spare, users, entries, dict(totals))
