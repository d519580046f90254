"""The Python shown in the README, in CONTRIBUTING and in the documents runs as it stands; links lead somewhere."""

import re
from pathlib import Path

import pytest
from test_task_pages import TASK_PAGES

from jaxpfl import METHODS
from jaxpfl.studies.registry import STUDIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
# The pages in docs/reference have their links in the site alone.
LINKED = [*PAGES, *ROOT.glob("docs/records/*.md"), ROOT / "CHANGELOG.md"]
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{i}", marks=() if page == ROOT / "README.md" else pytest.mark.slow)
    for page in PAGES
    if page.stem not in TASK_PAGES  # whose blocks need those before them: test_task_pages runs them
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(code, "block", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"\d\.\d+", shown), "a block shows a result"
    accuracies = re.findall(r"(?:mean|client|personalized|global) (\d\.\d+)", shown)
    assert accuracies or 'fit("' not in code
    assert all(0.5 < float(value) <= 1 for value in accuracies)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them of their text."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    inside = [(page.parent / target if target else page, anchor) for target, anchor in links if "://" not in target]
    assert [str(target) for target, _ in inside if not target.exists()] == []
    # Of the reference, the headings are made of the source, and building the site checks them.
    written = [
        (target, anchor) for target, anchor in inside if target.suffix == ".md" and "reference" not in target.parts
    ]
    assert [f"{target}#{anchor}" for target, anchor in written if anchor and anchor not in anchors(target)] == []


def test_every_method_and_study_is_documented():
    pages = {page: (ROOT / "docs" / f"{page}.md").read_text() for page in ("methods", "estimation", "network")}
    assert [name for name in METHODS if f"`{name}`" not in pages["methods"]] == []
    commands = re.findall(r"(?:jaxpfl estimate|or) ([\w-]+)", pages["estimation"] + pages["network"])
    assert set(STUDIES) - set(commands) == set()


def test_a_heading_has_its_anchor(tmp_path: Path):
    (tmp_path / "a.md").write_text("# One `--flag`, and [two](x.md)\n```sh\n# no heading\n```\n## Data and models\n")
    assert anchors(tmp_path / "a.md") == {"one---flag-and-two", "data-and-models"}
