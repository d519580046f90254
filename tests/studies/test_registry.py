"""Every registered study: its settings and help, the JSON contract, seeds, repetitions, and what its command writes."""

import dataclasses
import functools
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command import jaxpfl
from test_studies import write_elections

from jaxpfl.benchmarks import studies as benchmark_studies
from jaxpfl.benchmarks.studies.histogram import study as histogram
from jaxpfl.cli import estimate
from jaxpfl.cli.parsing import fields_of
from jaxpfl.studies import registry, when
from jaxpfl.studies.study import Options, Read, Results, Study
from jaxpfl.support.console import new_axes, save, signature
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import jsonable

SMALL = {
    "clients": 12, "samples": 6, "dim": 3, "repetitions": 3, "iterations": 2, "em_steps": 2, "gradient_steps": 2,
    "steps": 4, "rounds": 2,
}  # fmt: skip
"""Settings of the studies that have them; a new study needs no line here if these make it small."""
OWN: dict[str, dict[str, Any]] = {
    # Without the private columns, which compile for a minute: tests/cli/test_estimate_histogram.py has them.
    "histogram": {
        **{"users": 40, "tokens": 12, "components": 2, "clusters": 2, "rounds": 2, "em_steps": 2},
        **{"epsilon": (), "kept_tokens": 1, "candidates": 12},
    },
    "regression-mixture": {"samples": (4, 6)},
    "network": {"clusters": 2, "neighbours": 2, "strengths": (0.1,), "methods": ("local", "network-lasso")},
    "compression": {
        "data": "planted:clients=3,clusters=1,examples=20,dim=4",
        "compressors": ("lossless", "qsgd:levels=1"),
        "rates": (1.0,),
    },
    "elections": {"epsilon": (1.0,)},
    "normal-means": {"priors": ("point-normal",)},
}
every = pytest.mark.parametrize("name", registry.STUDIES)


@pytest.fixture(scope="module", autouse=True)
def elections(tmp_path_factory: pytest.TempPathFactory):
    rng = np.random.default_rng(0)
    won = rng.random((30, 6)) < rng.random((30, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPFL_DATA_DIR", write_elections(tmp_path_factory.mktemp("data"), won))
        yield


def changes(name: str) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(registry.get(name).settings)]
    return {key: value for key, value in SMALL.items() if key in fields} | OWN.get(name, {})


def small(name: str, **change: Any) -> Any:
    return registry.get(name).settings(**changes(name) | change)


def has(name: str, field: str) -> bool:
    return field in {of.name for of in dataclasses.fields(registry.get(name).settings)}


@functools.cache
def made(name: str) -> Results:
    return registry.get(name).run(small(name))


def numbers(results: Results) -> dict[str, Any]:
    return jsonable({key: value for key, value in results.json.items() if key != "settings"})


def flags(name: str) -> list[str]:
    found: list[str] = []
    for key, value in changes(name).items():
        found += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    return found


@every
def test_settings_are_frozen_and_explained(name):
    study = registry.get(name)
    assert study.settings() == study.settings()
    for kind in filter(None, (study.settings, study.options)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind(), dataclasses.fields(kind)[0].name, None)
        assert all(field.helptext for field in fields_of(kind, None)), "a flag without help"
    assert study.options is None or issubclass(study.options, Options)


@every
def test_help(capsys, name):
    """The group's help names the study by its line, its own help opens with it and explains every flag."""
    study, line = registry.get(name), registry.STUDIES[name]
    assert line.endswith(".")
    assert len(line) < 120
    listed, own = jaxpfl(capsys, "estimate", "--help"), jaxpfl(capsys, "estimate", name, "--help")
    assert listed.status == own.status == 0
    assert f"  {name} " in listed.out
    kinds = [kind for kind in (study.settings, study.options) if kind is not None]
    assert " ".join(own.out.split()).startswith(f"usage: jaxpfl estimate {name} [flags] {line}")
    for kind in kinds:
        for field in fields_of(kind, None):
            assert f"  --{field.name.replace('_', '-')} " in own.out


@every
def test_bad_values_are_refused_by_name(name):
    """Numbers below any range, and none at all: a line with the setting's name, or it is one that may be anything."""
    given, tried = small(name), 0
    for field in dataclasses.fields(given):
        if "seed" in field.name:
            continue
        for bad in {"int": [-1], "float": [math.nan, math.inf], "float | None": [math.nan], "int | None": [-1]}.get(
            str(field.type), []
        ):
            with pytest.raises(JaxpflError) as error:
                dataclasses.replace(given, **{field.name: bad}).check()
            assert "\n" not in str(error.value)
            assert field.name in str(error.value), str(error.value)
            tried += 1
    assert tried


@every
def test_seeds_that_would_be_those_of_another_run_are_refused(name):
    """JAX's key of a seed outside 32 bits is that of one within."""
    if not has(name, "seed"):
        pytest.skip("it draws nothing")
    for seed in (-1, 2**32, 2**63 - 1, math.nan, math.inf):
        with pytest.raises(JaxpflError, match=f"^seed must be a whole number from 0 to 4294967295, got {seed}$"):
            registry.get(name).run(small(name, seed=seed))


@every
def test_a_refusal_is_one_line_and_leaves_no_folder(capsys, tmp_path, name):
    field = next(f.name for f in dataclasses.fields(small(name)) if f.type in ("int", "float") and "seed" not in f.name)
    flag = f"--{field.replace('_', '-')}"
    found = jaxpfl(capsys, "estimate", name, *flags(name), flag, "-1", "--json", "--output", tmp_path / "out")
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1
    assert field in found.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@every
def test_json_and_tables(name):
    found, given = made(name), small(name)
    assert found.json["study"] == name
    said = found.json["settings"]
    assert said == {key: value for key, value in vars(given).items() if key in said}
    assert vars(given).keys() - said.keys() <= {"data_dir"}
    text = json.dumps(jsonable(found.json), allow_nan=False)
    assert json.loads(text).keys() == found.json.keys()
    blocks = list(found.tables())
    assert blocks
    assert all("\n" not in block for block in blocks if isinstance(block, str))
    for key, values in found.series.items():
        assert len(values) in (1, given.repetitions), key
        assert np.isfinite(values).all(), key


def test_studies_of_data_read_them_apart():
    """For the checksum, and once for checksum and results together."""
    readers = {name: study for name in registry.STUDIES if (study := registry.get(name)).reads is not None}
    assert set(readers) == {"compression", "elections", "histogram"}
    for name, study in readers.items():
        found = study.reads(small(name))
        assert isinstance(found, Read)
        assert (found.arrays is None) == (name == "histogram")  # drawn there


def test_users_that_were_read_are_not_read_again(tmp_path, monkeypatch):
    """Their counts reach the histogram study beside its options."""
    path = tmp_path / "users.csv"
    path.write_text("user,token,count\n0,a,3\n0,b,1\n1,a,2\n")
    study = registry.get("histogram")
    assert study.reads is not None
    given = study.settings(data=f"csv:{path}", tokens=2)
    found = study.reads(given)
    path.unlink()
    seen = []
    monkeypatch.setattr(
        histogram, "run", lambda given, counts: seen.append(counts) or SimpleNamespace(result={}, series={})
    )
    study.run(given, read=found)
    assert seen == [found.data]


@pytest.mark.slow
@every
def test_repetitions_follow_from_the_seed(name):
    """Repetition r depends on the seed and r alone, so that a longer run begins with a shorter one."""
    if not has(name, "seed"):
        pytest.skip("nothing is drawn")
    study = registry.get(name)
    assert numbers(study.run(small(name, seed=1))) != numbers(made(name))
    if not has(name, "repetitions"):
        return
    short, long = made(name).series, study.run(small(name, repetitions=5)).series
    assert short.keys() == long.keys()
    assert short
    several = 0
    for key, values in short.items():
        np.testing.assert_allclose(long[key][: len(values)], values, rtol=1e-4, atol=1e-6, err_msg=key)
        several += len(np.unique(values)) > 1
    assert several, "no repetition differs from another"


@pytest.mark.slow
@every
def test_the_output_folder_holds_what_is_said(capsys, tmp_path, monkeypatch, name):
    """Of a study that was run once for all tests of this file."""
    folder, study = tmp_path / "out", registry.get(name)

    def results(given: Any, *more: Any) -> Results:
        assert changes(name).items() <= vars(given).items()
        return made(name)

    once = dataclasses.replace(study, results=results)
    made(name)
    monkeypatch.setattr(registry, "get", lambda asked: {name: once}[asked])
    first = jaxpfl(capsys, "estimate", name, *flags(name), "--json", "--output", folder)
    assert (first.status, first.err) == (0, "")
    printed, stored = json.loads(first.out), json.loads((folder / "summary.json").read_text())
    assert printed == stored
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert here == {*stored["files"], "summary.json"}
    assert stored["plots"]
    for plot in stored["plots"]:
        assert (folder / plot).read_bytes().startswith(b"\x89PNG")
        assert signature(folder / plot) is None  # no claim of another command


def test_a_study_replaces_its_own_folder_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(when, "write_plots", lambda folder, given: [save(new_axes("", "", "")[0], folder, "phases")])
    folder = tmp_path / "out"
    for _ in range(2):
        made = jaxpfl(capsys, "estimate", "when", "--output", folder)
        assert made.status == 0
        assert made.out.endswith(f"results: {folder} (summary.json, plots/)\n")
    refused = jaxpfl(capsys, "estimate", "ditto", "--output", folder)
    assert (refused.status, refused.out) == (2, "")
    assert f"{folder} contains plots but no results of jaxpfl estimate ditto: choose another --output" in refused.err


def test_an_unknown_study_suggests_the_nearest(capsys):
    with pytest.raises(JaxpflError, match="unknown study 'gausian': did you mean 'gaussian'"):
        registry.get("gausian")
    assert "did you mean 'gaussian'" in jaxpfl(capsys, "estimate", "gausian").err


@pytest.mark.slow
def test_only_the_study_that_is_named_is_imported():
    """``jaxpfl estimate --help`` imports none."""
    script = (
        "import sys; from jaxpfl.cli import estimate\n"
        "names = lambda: sorted(m.rpartition('.')[2] for m in sys.modules if '.studies.' in m)\n"
        "assert len(estimate.commands([])) == len(estimate.registry.STUDIES)\n"
        "assert names() == ['registry', 'study'], names()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=300)


def test_commands_are_the_registry():
    assert [command.__name__.replace("_", "-") for command in estimate.commands()] == list(registry.STUDIES)
    assert all(isinstance(registry.get(name), Study) for name in registry.STUDIES)
    papers = Path(benchmark_studies.__file__)
    modules = {path.stem for of in (Path(registry.__file__), papers) for path in of.parent.iterdir()}
    assert {name.replace("-", "_") for name in registry.STUDIES} <= modules


def arguments(name: str, options: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    study = registry.get(name)
    given = None if study.options is None else study.options(**(options or {}))
    return list(study.arguments(study.settings(**settings), given))


@every
def test_a_study_by_itself_needs_none(name: str):
    assert arguments(name) == []


def test_values_of_every_kind():
    assert arguments("histogram", epsilon=(), clusters=2) == ["--clusters", "2", "--epsilon"]
    assert arguments("gaussian", {"csv": Path("g.csv"), "value": "-v", "client": "c"}, mean=-1.0) == [
        *("--mean=-1.0", "--client", "c", "--value=-v", "--csv", str(Path("g.csv").absolute()))
    ]


@pytest.mark.slow
def test_the_command_in_a_folder_gives_its_results_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "table.csv"
    table.write_text("client,estimate,se\n" + "".join(f"c{i},{i % 5},{1 + i % 3}\n" for i in range(12)))
    given = ("--csv", table, "--prior", "normal", "--level", "0.9", "--output", tmp_path / "out")
    first = jaxpfl(capsys, "estimate", "normal-means", *given, "--json").json
    assert jaxpfl(capsys, *first["command"][1:], "--json").json.items() <= first.items()
    assert jaxpfl(capsys, "report", tmp_path / "out").status == 0
    assert shlex.join(first["command"]) + " --output NEW_FOLDER" in (tmp_path / "out" / "report.html").read_text()
