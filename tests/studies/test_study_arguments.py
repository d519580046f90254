"""Arguments that give a study's settings and options again."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.cli import main
from jaxpfl.studies import registry


def of(name: str, options: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    study = registry.get(name)
    given = None if study.options is None else study.options(**(options or {}))
    return list(study.arguments(study.settings(**settings), given))


@pytest.mark.parametrize("name", registry.STUDIES)
def test_a_study_by_itself_needs_none(name: str):
    assert of(name) == []


def test_values_of_every_kind():
    assert of("histogram", epsilon=(), clusters=2) == ["--clusters", "2", "--epsilon"]
    assert of("gaussian", {"csv": Path("g.csv"), "value": "-v", "client": "c"}, mean=-1.0) == [
        *("--mean=-1.0", "--client", "c", "--value=-v", "--csv", str(Path("g.csv").absolute())),
    ]


@pytest.mark.slow
def test_the_command_in_a_folder_gives_its_results_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "table.csv"
    table.write_text("client,estimate,se\n" + "".join(f"c{i},{i % 5},{1 + i % 3}\n" for i in range(12)))
    given = ["--csv", str(table), "--prior", "normal", "--level", "0.9", "--output", str(tmp_path / "out")]
    main(["estimate", "normal-means", *given, "--json"])
    first = json_of(capsys)
    main([*first["command"][1:], "--json"])
    second = json_of(capsys)
    assert second.items() <= first.items()
    main(["report", str(tmp_path / "out")])
    assert shlex.join(first["command"]) + " --output NEW_FOLDER" in (tmp_path / "out" / "report.html").read_text()


def json_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)
