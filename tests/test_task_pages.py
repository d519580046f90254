"""The task pages: every block runs, in the order of its page, in one folder; each page is short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TASK_PAGES = (
    *("first-comparison", "own-data", "own-arrays", "own-model", "own-method"),
    *("choose-settings", "private-training", "large-runs", "read-a-report", "export-a-model"),
)
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)


def run_block(kind: str, code: str, folder: Path) -> str:
    """Run a block of a page and return its standard output; a block of TOML is a file that its first line names."""
    if kind == "toml":
        (folder / code.partition("\n")[0].removeprefix("# ")).write_text(code)
        return ""
    command = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[kind]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    finished = subprocess.run([*command, code], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True)
    assert finished.returncode == 0, finished.stderr.decode() + finished.stdout.decode()
    return finished.stdout.decode()


@pytest.mark.parametrize("name", TASK_PAGES)
def test_page_is_short(name: str):
    text = (DOCS / f"{name}.md").read_text()
    assert len(text.split()) < 900
    assert {kind for kind, _ in _BLOCK.findall(text)} <= {"sh", "python", "toml", "text"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASK_PAGES)
def test_page_runs(name: str, tmp_path: Path):
    blocks = [(kind, code) for kind, code in _BLOCK.findall((DOCS / f"{name}.md").read_text()) if kind != "text"]
    assert blocks
    for kind, code in blocks:
        shown = run_block(kind, code, tmp_path)
        assert kind != "python" or "print" not in code or re.search(r"\d", shown), "a block shows a result"
