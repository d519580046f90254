"""The Python shown in the README and in CONTRIBUTING runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(code, id=f"{name}-{i}")
    for name in ("README.md", "CONTRIBUTING.md")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(code, "block", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"\d\.\d+", shown), "a block shows a result"
    accuracies = re.findall(r"(?:mean|client|personalised|global) (\d\.\d+)", shown)
    assert accuracies or 'fit("' not in code
    assert all(0.5 < float(value) <= 1 for value in accuracies)
