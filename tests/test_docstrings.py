"""Docstrings open with a noun phrase or an imperative, never a word of a question; examples have a heading."""

import ast
from pathlib import Path

import jaxpfl

ROOT = Path(jaxpfl.__file__).parent
AVOIDED = {"what", "who", "whose", "whom", "how", "of", "where", "whether", "which", "that", "why"}


def docstrings(tree: ast.Module) -> list[tuple[str, str]]:
    """Every docstring of a module with the name of its owner; the module's own under ``<module>``."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    owners = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(getattr(node, "name", "<module>"), text) for node in owners if (text := ast.get_docstring(node))]


def first_word(text: str) -> str:
    """The first word of a docstring in lower case: "what" of ``What's``."""
    word = text.split()[0].lower()
    return word.split("'")[0].rstrip(".,:;")


def test_no_docstring_opens_with_a_word_of_a_question():
    """Such openings are replaced by a noun or an imperative: "Clients of the cohort", "Return the cohort"."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        found = docstrings(ast.parse(path.read_text(encoding="utf-8")))
        wrong += [f"{path.relative_to(ROOT)}, {name}: {text}" for name, text in found if first_word(text) in AVOIDED]
    assert not wrong


def test_examples_stand_under_their_heading():
    """The site renders them from there alone: ``>>>`` elsewhere is a quotation, and ``Example:`` no heading."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        for name, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            blocks = [block.splitlines() for block in text.split("\n\n") if ">>> " in block]
            if any("Examples:" not in block[0] or not block[1].startswith("  ") for block in blocks):
                wrong.append(f"{path.relative_to(ROOT)}, {name}")
    assert not wrong
