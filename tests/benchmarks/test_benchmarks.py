"""The benchmarks run and write whole records, both as a package and as files. No test looks at a time."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from benchmark_modules import benchmark_module

from jaxpfl.benchmarks import kernels
from jaxpfl.benchmarks import record as records
from jaxpfl.benchmarks.__main__ import NAMES, main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


def python(*args: str, status: int = 0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, env=environment())
    assert done.returncode == status, done.stderr
    return done


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "JAXPFL_DATA_DIR"}  # quick ones need no files


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """Process that runs benchmarks in its forks."""
    script, pipe = Path(__file__).with_name("forked_benchmark.py"), subprocess.PIPE
    command = [sys.executable, str(script), str(jax.config.jax_compilation_cache_dir)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment()) as running:
        yield running


@pytest.fixture
def record(tmp_path: Path, runner: subprocess.Popen[str]) -> Callable[..., dict[str, Any]]:
    """Function of a benchmark's arguments that returns its record, with what every record has checked."""
    path, out, err = (tmp_path / name for name in ("made/record.json", "out", "err"))

    def run(*args: str) -> dict[str, Any]:
        assert runner.stdin is not None
        assert runner.stdout is not None
        arguments = [*args, "--quick", "--json", str(path)]
        print(json.dumps([arguments, str(out), str(err)]), file=runner.stdin, flush=True)
        assert runner.stdout.readline() == "0\n", err.read_text()
        assert out.read_text()
        return checked(path, args[0])

    return run


def checked(path: Path, name: str) -> dict[str, Any]:
    """The record in a file, whose common parts are whole."""
    found = json.loads(path.read_text())
    assert found["benchmark"] == name
    assert "data_dir" not in found["settings"]
    assert {"python", "versions", "cpu", "cores", "flags", "commit"} <= set(found["environment"])
    assert found["environment"]["versions"]["jax"]
    return found


def check_contenders(results: dict[str, Any]) -> None:
    assert results
    for row in results.values():
        assert {"first", "rounds", "seconds", "median", "facts"} <= set(row)
        assert all(math.isfinite(value) and value > 0 for value in (*row["seconds"], row["median"], row["first"]))


@pytest.mark.slow
def test_without_a_name_all_are_listed_within_the_terminals_width():
    lines = python("-m", "benchmarks").stdout.splitlines()
    entries = lines[: lines.index("")]
    names = (line.split()[0] for line in entries if not line.startswith("   "))  # continued lines stand further in
    assert tuple(names) == NAMES
    assert all(len(line) <= 80 for line in lines)


def test_an_unknown_name_is_one_line_with_the_nearest_match_and_status_2():
    done = python("-m", "benchmarks", "rond_cnn", status=2)
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "did you mean 'round_cnn'?" in done.stderr


@pytest.mark.parametrize("arguments", [["--repetitions", "0"], ["--clients", "none"], ["--no-such-option"]])
def test_bad_arguments_are_refused(capsys, arguments: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(["round_cnn", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: ")
    assert arguments[0] in said.err


def test_json_without_a_file_is_alone_on_standard_output(capsys, tmp_path: Path):
    @records.command
    def own(argv: list[str] | None = None) -> None:
        args = records.parser("own", "A benchmark.").parse_args(argv)
        records.table("seconds", ("", "median"), [("ours", 1.5)])
        records.write(args.json, "own", {}, {"ours": 1.5})

    own(["--json"])
    said = capsys.readouterr()
    assert json.loads(said.out)["results"] == {"ours": 1.5}
    assert "median" in said.err
    own(["--json", str(tmp_path / "record.json")])
    said = capsys.readouterr()
    assert "median" in said.out
    assert json.loads((tmp_path / "record.json").read_text())["benchmark"] == "own"


@pytest.mark.slow
def test_each_file_runs_as_a_script_from_anywhere(tmp_path: Path):
    for name in NAMES:
        said = python(str(FOLDER / f"{name}.py"), "--help", cwd=tmp_path).stdout
        for option in ("--json", "--repetitions", "--data-dir", "--quick"):
            assert f"{option} " in said


@pytest.mark.slow
def test_a_contender_that_fails_is_one_line(tmp_path: Path):
    done = python(str(FOLDER / "adaped_flops.py"), "--data-dir", str(tmp_path), status=1)
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_operations_counted_by_hand():
    flops = benchmark_module("flops")
    assert flops.cnn_step("fedavg", 20) == pytest.approx(30.3e6, rel=0.002)
    assert flops.cnn_step("adaped") / flops.cnn_step("fedavg") == pytest.approx(2.74, abs=0.005)
    executed = flops.cnn_step_executed("fedavg") - flops.cnn_step("fedavg")
    convolutions = 20 * (2 * flops.CONV1 + 3 * flops.CONV2)
    assert executed == pytest.approx(0.44 * convolutions)


@pytest.mark.slow
def test_clients(record, tmp_path: Path):
    plot = tmp_path / "plot.png"
    found = record("clients", "--counts", "60", "120", "--plot", str(plot))
    check_contenders(found["results"])
    facts = found["results"]["60"]["facts"]
    assert facts["device"]["platform"]
    assert facts["peak_bytes"] > facts["temporary_bytes"] > 0
    assert set(facts["round"]) == {"trace", "lower", "xla", "total"}
    assert math.isfinite(found["slope"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_round_cnn(record):
    only = ("--only", "jaxpfl, one device", "three jax.grad calls", "torch loop, all threads")
    found = record("round_cnn", "--method", "adaped", *only)
    check_contenders(found["results"])
    assert all(0 <= row["facts"]["accuracy"] <= 1 for row in found["results"].values())
    assert "jaxpfl, one device" in found["results"]
    assert ("torch loop, all threads" in found["results"]) != ("torch loop, all threads" in found["skipped"])
    assert found["results"]["three jax.grad calls"]["facts"]["disagreement"] <= 1e-5


@pytest.mark.slow
def test_adaped_flops(record):
    found = record("adaped_flops")
    check_contenders(found["results"])
    assert found["ratios"]["work"] == pytest.approx(2.74, abs=0.005)
    assert found["ratios"]["flops_per_second"] == pytest.approx(found["ratios"]["work"] / found["ratios"]["time"])


@pytest.mark.slow
def test_roofline(record):
    found = record("roofline")
    check_contenders(found["results"])
    summary = found["summary"]
    assert summary["peak_flops"] == max(summary["products"].values())
    for row in summary["rounds"].values():
        assert row["executed_share"] > row["share"] > 0


@pytest.mark.slow
def test_sweep(record):
    found = record("sweep")
    check_contenders(found["results"])
    one, separate = (found["results"][f"2 {how}"]["facts"]["train_losses"] for how in ("in one program", "separate"))
    assert one == pytest.approx(separate, rel=1e-3)  # the same runs


@pytest.mark.slow
def test_streamed_draws_curves_over_clients_in_every_place(record, tmp_path: Path):
    plot = tmp_path / "curves.png"
    found = record("streamed", "--model", "linear", "--clients", "1", "2", "--plot", str(plot))
    check_contenders(found["results"])
    assert set(found["results"]) == {"device, 20", "host, 20", "disk, 20", "disk, 40"}  # more are beyond its memory
    assert all(row["facts"]["peak_bytes"] > 0 for row in found["results"].values())
    assert plot.read_bytes().startswith(b"\x89PNG")


RECORDS = {
    "linear_forms": lambda found: [row["ratio"] > 0 for row in found["results"].values()],
    "sweep_clients": lambda found: [row["status"] == "done" for row in found["results"]],
    "overhead": lambda found: [set(pair) == {"round", "bare"} for pair in found["results"].values()],
    "compile": lambda found: [{"adaped", "many_over_few"} <= set(found["ratios"])],
    "fusion": lambda found: [len(problem) == 4 for problem in found["results"].values()],
    "sums": lambda found: [
        max(row["error"] for row in rows.values()) == rows["plain loop"]["error"] for rows in found["results"].values()
    ],
    "processes": lambda found: [bool(found["results"]["linear"])],
    "ragged": lambda found: [
        found["results"]["memory"]["over_examples"] < found["asked"]["memory"]["floor"],
        {"equal", "one of 5000"} < set(found["results"]["linear, mini-batches"]),
    ],
    "interval_coverage": lambda found: [
        row["counted_coverage"] >= row["plug_in_coverage"] for row in found["results"].values()
    ],
    "robust": lambda found: [set(found["results"]) == {"local mean", "ditto mean", "ditto median"}],
    "adaped_plus": lambda found: [0 <= found["results"]["ablations"]["digits"][0]["accuracy"][0] <= 100],
    "graphs": lambda found: [
        row[how]["error"] < 1e-4 for row in found["results"]["network lasso"].values() for how in ("spectrum", "cg")
    ],
    "second_fit": lambda found: [row["cpu"] > 0 and row["wall"] > 0 for row in found["results"].values()],
    "drift": lambda found: [0 < one < 1e-5 for one in found["results"]["fedavg"]["distance"]],
    "estimators": lambda found: [
        row["facts"]["errors"]["personalized"] < row["facts"]["errors"]["local"] for row in found["results"].values()
    ],
    "histograms": lambda found: [row["facts"]["sparse_bytes"] > 0 for row in found["results"].values()],
    "bernoulli_coverage": lambda found: [
        0.8 < one["coverage"] <= 1 for cell in found["results"]["cells"] for one in cell["variation"].values()
    ],
    "private_gain": lambda found: [set(found["results"]) == {"digits 0 local", "digits 0 FedAvg+"}],
    "adapters": lambda found: [found["results"]["base"]["perplexity"] > 1],
}
"""Facts that must hold of the records of benchmarks."""
ARGUMENTS = {
    "ragged": ("--models", "linear"),
    "drift": ("--methods", "fedavg"),
    "overhead": ("--only", "linear"),
    "bernoulli_coverage": ("--variation", "0", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_records_are_whole(record, name: str):
    assert all(RECORDS[name](record(name, *ARGUMENTS.get(name, ()))))


@pytest.mark.slow
def test_estimators_compared(record):
    found = record("estimators_compared")
    rows = found["results"]
    for label, row in rows.items():
        assert row["rmse"] < row["local_rmse"] or label.startswith("private")
        assert (row["work"] == "private") == ("rmse_stderr" in row)
        assert row["median"] > 0
        assert row["peak_bytes"] > 0
    for prior, name, port in (("mixed model", "jaxpfl", "plain loop"), ("scale mixture", "jaxpfl", "ashrink")):
        label = f"{prior}, {port}, 200"
        assert (label in rows) != (label in found["skipped"])
        if label in rows:
            assert rows[label]["rmse"] == pytest.approx(rows[f"{prior}, {name}, 200"]["rmse"], rel=0.01)


@pytest.mark.slow
def test_privacy_chooses_on_examples_set_apart_and_goes_on_where_it_was_interrupted(record, tmp_path: Path):
    study = ("privacy", "table2", "--programs", "local")
    assert set(record(*study)["results"]) == {"local"}
    found = record(*study, "fedavg", "local-rate", "--also", "1e-6")["results"]  # into the same file
    rates = found["local-rate, trials"]["found"]
    assert found["local-rate"]["found"]["lr"] == max(rates, key=lambda t: (t["after"], -t["lr"]))["lr"]
    assert "C = 1e-06" in found["fedavg, eps 3.35, C 1e-06"]["found"]["statement"]
    tries = found["fedavg, trials"]["found"]
    assert len(tries) == 12
    for eps in (3.35, 13.16, 27.3):
        for which in ("global", "after"):  # the rows FedAvg and FedAvg+
            best = max((t for t in tries if t["epsilon"] == eps), key=lambda t: (t[which], -t["clipping_norm"]))
            run = found[f"fedavg, eps {eps:g}, C {best['clipping_norm']:g}"]["found"]
            assert f"eps = {eps:.4g} at delta = 0.0001" in run["statement"]
            assert all(0 <= value <= 1 for value in run[which])
    other = python("-m", "benchmarks", *study, "--json", str(tmp_path / "made" / "record.json"), status=1)
    assert "has different settings" in other.stderr


@pytest.mark.slow
def test_defaults_keeps_every_try_and_goes_on_where_it_was_interrupted(record):
    one = record("defaults", "--methods", "perfedavg", "--data", "digits")["results"]
    rates = {each["set"]["alpha"] for each in one["perfedavg"]["digits"]["tries"]}
    assert {1e-3, 0.1} < rates  # the paper's value is among the tries
    more = record("defaults", "--methods", "perfedavg", "fml", "--data", "digits")["results"]
    assert more["perfedavg"] == one["perfedavg"]
    for each in more["fml"]["digits"]["tries"]:
        assert each["accuracy"] == pytest.approx(sum(each["clients"]) / len(each["clients"]), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adaped vmap bfloat16 parameters", "fit full, 1 seed(s)", "clients in host"])
def test_gpu_runs_anywhere_when_told(record, name: str):
    found = record("gpu", "--anywhere", "--only", name)
    assert found["device"]["platform"]
    assert list(found["results"]) == [name]
    for row in found["results"].values():
        assert "error" not in row
        assert min(row["median"], sum(row.get("kernels_ms", {"": 1}).values())) > 0


@pytest.mark.slow
def test_gpu_records_a_configuration_that_fails_and_what_a_budget_left(tmp_path: Path):
    """And refuses a machine without one unless it is told."""
    if jax.default_backend() == "cpu":
        assert len(python("-m", "benchmarks", "gpu", status=1).stderr.splitlines()) == 1
    path, few = tmp_path / "record.json", ("--timeout", "1", "--budget", "1")
    python("-m", "benchmarks", "gpu", "--anywhere", "--only", "linear", *few, "--quick", "--json", str(path))
    found = checked(path, "gpu")
    assert (len(found["results"]), len(found["not_started"])) == (1, 2)
    assert all("longer than 1 s" in row["error"] for row in found["results"].values())


@pytest.mark.slow
def test_own_models(record):
    found = record("own_models")
    check_contenders(found["results"])
    rows = found["summary"]["contenders"]
    for name in ("LeNet linen, products", "LeNet nnx, plain"):
        assert rows[name]["over_built_in"] > 0
    flops = {name: row["facts"].get("flops") for name, row in found["results"].items()}
    # By hand: 30.3 MFLOP a step of twenty without the first layer's input, which this count has.
    forward = 2 * (24 * 24 * 6 * 25 + 8 * 8 * 16 * 150 + 256 * 120 + 120 * 84 + 84 * 10)
    assert flops["cnn"] == flops["LeNet linen, products"] == flops["LeNet nnx, plain"] == 3 * 2 * forward


@pytest.mark.slow
def test_lowered(record):
    flops = benchmark_module("flops")
    for method, row in record("lowered")["results"].items():
        assert row["flops"] == pytest.approx(row["steps"] * flops.cnn_step_executed(method), rel=1e-3)
        assert row["seconds"] > row["flops"] / 67e12
        for key, total in (("flops", "flops"), ("bytes", "product_bytes")):
            assert sum(one[key] for one in row["products"]) == pytest.approx(row[total])
        assert [one["flops"] for one in row["products"]] == sorted(
            (one["flops"] for one in row["products"]), reverse=True
        )


COMPILED = """
%step (at: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %once = (f32[4]{0}, /*index=1*/s32[]) fusion(%x), kind=kLoop, calls=%fused
  ROOT %again = f32[4]{0} fusion(%once), kind=kLoop, calls=%fused
}
%more (at: f32[4]) -> pred[] {
  ROOT %less = pred[] fusion(%at), kind=kLoop, calls=%fused
}
%round (at: f32[4]) -> f32[4] {
  %drawn = f32[4]{0} custom-call(%at), custom_call_target="draw"
  %steps = f32[4]{0} while(%at), condition=%more, body=%step, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %either = f32[4]{0} conditional(%drawn, %at, %at), branch_computations={%more, %step}
}
ENTRY %main (a: f32[4]) -> f32[4] {
  %copied = f32[4]{0} copy(%a)
  ROOT %trained = f32[4]{0} while(%copied), condition=%more, body=%round
}
"""


def test_launches_of_a_compiled_program():
    a_round = 1 + 10 * 2 + 2 + 1  # the draw, ten steps, the larger branch, the condition
    assert kernels.launches(COMPILED, in_loops=True) == a_round
    assert kernels.launches(COMPILED) == a_round + 1  # the copy
    assert kernels.moved(COMPILED, in_loops=True) == 16 + 10 * (2 * 36) + 2 * 36 + 1


def test_kernels_asks_for_the_missing_plugin(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "entry_points", lambda group: ())
    with pytest.raises(SystemExit) as stop:
        main(["kernels"])
    assert stop.value.code == 1
    missing = "error: JAX's CUDA plugin is missing: pip install 'jax[cuda12]' (no GPU is needed)\n"
    assert capsys.readouterr().err == missing
