"""Hooks of the documentation's site: pages from outside of ``docs``, and the reference of commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from jaxpfl.cli import help
from jaxpfl.cli.app import command_table
from jaxpfl.cli.parsing import flags_of
from jaxpfl.core import exclusions

ROOT = Path(__file__).parents[1]
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "notebooks/*.ipynb", "benchmarks/results/*.json")
"""Files outside of ``docs`` that pages link to; they keep their paths in the site."""
COMMANDS = "reference/commands.md"
_INTRODUCTION = """# Commands

Every command and its flags, as `jaxpfl COMMAND --help` explains them. `jaxpfl run METHOD --help` also has the method's
own hyper-parameters, which `--set` takes; a config file (`--config`) takes the same names."""
_LIKE_RUN = "It also takes the flags of [`jaxpfl run`](#jaxpfl-run) about data, work, privacy, execution and output."


def on_files(files: Files, config: Any) -> Files:
    """Add the files that stand beside ``docs``, and the page of commands."""
    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, COMMANDS, content=_commands()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to files beside ``docs``, and from them into it, lead to their places in the site; fill in tables."""
    del config, files
    if page.parent is not None and page.parent.title == "How do I":
        page.meta["search"] = {"boost": 2}  # answers to a task come before pages that mention its words
    markdown = markdown.replace("<!-- exclusions -->", exclusions.table())
    inside = page.file.src_uri
    if inside.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    if inside.startswith("records/"):
        return markdown.replace("](../../", "](../")
    return re.sub(r"\]\((?:\.\./|docs/)", "](", markdown) if "/" not in inside else markdown


def _commands() -> str:
    """Every command with its flags, as ``--help`` has them; those of ``jaxpfl run`` once."""
    of_run = {flag.name for flag in flags_of(command_table()["jaxpfl run"])}
    sections = [_INTRODUCTION]
    for name, command in command_table().items():
        flags = flags_of(command)
        own = [flag for flag in flags if name == "jaxpfl run" or flag.name not in of_run]
        sections += [f"## {name}", help.summary(command)]
        if own:
            rows = "\n".join(f"| `{_cell(help.label(flag))}` | {_cell(help.flag_text(flag))} |" for flag in own)
            sections.append(f"| flag | meaning |\n|---|---|\n{rows}")
        if more := [flag for flag in flags if flag not in own]:
            named = ", ".join(f"`{flag.name}`" for flag in more)
            sections.append(f"Like [`jaxpfl run`](#jaxpfl-run): {named}." if len(more) < 8 else _LIKE_RUN)
    return "\n\n".join(sections) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
