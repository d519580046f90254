"""Docstrings open with a noun phrase or an imperative, never a word of a question; examples have a heading."""

import ast
import functools
from pathlib import Path

import jaxpfl

ROOT = Path(jaxpfl.__file__).parent
AVOIDED = {"what", "who", "whose", "whom", "how", "of", "where", "whether", "which", "that", "why"}


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Every docstring of the package with its file and the name of its owner; a module's own under ``<module>``."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        owners = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
        texts = [(getattr(node, "name", "<module>"), ast.get_docstring(node)) for node in owners]
        found += [(f"{path.relative_to(ROOT)}, {name}", text) for name, text in texts if text]
    return found


def first_word(text: str) -> str:
    """The first word of a docstring in lower case: "what" of ``What's``."""
    word = text.split()[0].lower()
    return word.split("'")[0].rstrip(".,:;")


def test_no_docstring_opens_with_a_word_of_a_question():
    """Such openings are replaced by a noun or an imperative: "Clients of the cohort", "Return the cohort"."""
    assert not [f"{name}: {text}" for name, text in docstrings() if first_word(text) in AVOIDED]


def test_examples_stand_under_their_heading():
    """The site renders them from there alone: ``>>>`` elsewhere is a quotation, and ``Example:`` no heading."""
    wrong = []
    for name, text in docstrings():
        blocks = [block.splitlines() for block in text.split("\n\n") if ">>> " in block]
        if any("Examples:" not in block[0] or not block[1].startswith("  ") for block in blocks):
            wrong.append(name)
    assert not wrong
