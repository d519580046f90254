"""The Python shown in the README, in CONTRIBUTING and in the documents runs as it stands; links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(code, "block", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"\d\.\d+", shown), "a block shows a result"
    accuracies = re.findall(r"(?:mean|client|personalised|global) (\d\.\d+)", shown)
    assert accuracies or 'fit("' not in code
    assert all(0.5 < float(value) <= 1 for value in accuracies)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []
