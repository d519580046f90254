"""Every notebook runs from top to bottom at reduced size, and is committed with the outputs of a run in full."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000

FRESH = """
%reset -f
import gc
import jax
from jaxpfl.engine import execution_plan

jax.config.update("jax_enable_x64", False)
execution_plan._MOST_DEVICES = 1
execution_plan._CACHE_BYTES = 0
gc.freeze()
gc.set_threshold(20_000, 20, 20)
"""
"""First cell of every notebook, which finds none of the names and settings of the one before."""

each = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def parameters(found: list[Any]) -> int:
    """The place of the only cell whose values a reduced run replaces; its metadata say by what."""
    (place,) = (i for i, cell in enumerate(found) if "parameters" in cell["metadata"].get("tags", []))
    return place


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """Kernel that all notebooks share, with what it has imported, and the programs of the other tests."""
    from jupyter_client.manager import KernelManager

    with pytest.MonkeyPatch.context() as patch:
        folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder or "")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield (manager := KernelManager())
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
@each
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_notebook_runs(path: Path, kernel: Any, tmp_path: Path):
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    place = parameters(notebook.cells)
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(notebook.cells[place].metadata["quick"]))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FRESH))
    # In the folder of the checkout, a kernel would import jaxpfl from there instead of the installed package.
    # No limit on a cell: a busy machine takes as long as it takes.
    nbclient.NotebookClient(notebook, km=kernel, timeout=None, startup_timeout=600).execute(cwd=str(tmp_path))
    assert any(cell.get("outputs") for cell in notebook.cells[1:])


@each
def test_a_notebook_is_committed_as_it_ran(path: Path):
    found = cells(path)
    code = [cell for cell in found if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "not run from top to bottom"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})], "no picture"
    assert path.stat().st_size < MOST_BYTES
    assert "/tmp/" not in path.read_text(encoding="utf-8"), "a path of the machine that ran it"
    shown = ["".join(output.get("text", ())) for output in outputs]
    assert not [text for text in shown if re.search(r"(?:^|\s)/\S+\.py\b", text)], "a path of the machine that ran it"


@each
def test_a_reduced_run_replaces_parameters_alone(path: Path):
    """A name that the parameters lack would reduce nothing."""
    found = cells(path)
    cell = found[parameters(found)]
    given = assigned("".join(cell["source"]))
    assert given
    assert assigned(cell["metadata"]["quick"]) <= given


def assigned(code: str) -> set[str]:
    names = [re.split(r"\s*,\s*", left) for left in re.findall(r"^([\w, ]+?) = ", code, flags=re.MULTILINE)]
    return {name for line in names for name in line}


@each
def test_a_page_links_to_the_notebook(path: Path):
    assert f"../notebooks/{path.name}" in (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")


@each
def test_links_of_a_notebook_lead_somewhere(path: Path):
    text = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\((\.\.?/[^)#]+)", text):
        assert (path.parent / target).exists(), target


@each
def test_a_notebook_uses_public_names(path: Path):
    code = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")
    assert not re.findall(r"jaxpfl(?:\.\w+)*\.(?:engine|experiment|winners|sweep|reports)\b", code)
    assert not re.findall(r"\b\w+\._[a-z]\w*", code.replace("._replace(", "("))
