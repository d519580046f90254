"""The benchmarks run and write whole records, both as a package and as files. No test looks at a time."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import benchmark_module

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
NAMES = (
    "round_cnn",
    "own_models",
    "adaped_flops",
    "roofline",
    "clients",
    "sweep",
    "sweep_clients",
    "orders",
    "streamed",
    "overhead",
    "compile",
    "second_fit",
    "fusion",
    "sums",
    "drift",
    "processes",
    "ragged",
    "estimators",
    "estimators_compared",
    "interval_coverage",
    "bernoulli_coverage",
    "needles",
    "histograms",
    "graphs",
    "defaults",
    "adaped_plus",
    "robust",
    "privacy",
    "private_gain",
    "silos",
    "adapters",
    "lowered",
    "cost",
    "gpu",
)


def python(*args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == status, done.stderr
    return done


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "JAXPFL_DATA_DIR"}  # quick ones need no files


def record(tmp_path: Path, *args: str) -> dict[str, Any]:
    """The record of a benchmark, with what every record has checked."""
    path = tmp_path / "made" / "record.json"
    assert python("-m", "benchmarks", *args, "--quick", "--json", str(path)).stdout
    found = json.loads(path.read_text())
    assert found["benchmark"] == args[0]
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
    from jaxpfl.benchmarks.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main(["round_cnn", *arguments])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("error: ")
    assert arguments[0] in said.err


def test_json_without_a_file_is_alone_on_standard_output(capsys, tmp_path: Path):
    from jaxpfl.benchmarks import record

    @record.command
    def main(argv: list[str] | None = None) -> None:
        args = record.parser("own", "A benchmark.").parse_args(argv)
        record.table("seconds", ("", "median"), [("ours", 1.5)])
        record.write(args.json, "own", {}, {"ours": 1.5})

    main(["--json"])
    said = capsys.readouterr()
    assert json.loads(said.out)["results"] == {"ours": 1.5}
    assert "median" in said.err
    main(["--json", str(tmp_path / "record.json")])
    said = capsys.readouterr()
    assert "median" in said.out
    assert json.loads((tmp_path / "record.json").read_text())["benchmark"] == "own"


# All begin alike; each is a process of its own.
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "clients" else pytest.mark.slow) for n in NAMES])
def test_each_file_runs_as_a_script_from_anywhere(name: str, tmp_path: Path):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(option in done.stdout for option in ("--json", "--repetitions", "--data-dir", "--quick"))


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
def test_clients(tmp_path: Path):
    found = record(tmp_path, "clients", "--counts", "60")
    check_contenders(found["results"])
    facts = found["results"]["60"]["facts"]
    assert facts["device"]["platform"]
    assert facts["peak_bytes"] > facts["temporary_bytes"] > 0
    assert set(facts["round"]) == {"trace", "lower", "xla", "total"}


@pytest.mark.slow
def test_clients_draws_its_plot(tmp_path: Path):
    plot = tmp_path / "plot.png"
    found = record(tmp_path, "clients", "--model", "cnn", "--plot", str(plot))
    assert len(found["results"]) == 2
    assert math.isfinite(found["slope"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_round_cnn(tmp_path: Path):
    found = record(tmp_path, "round_cnn", "--method", "adaped")
    check_contenders(found["results"])
    assert all(0 <= row["facts"]["accuracy"] <= 1 for row in found["results"].values())
    assert "jaxpfl, one device" in found["results"]
    for name in ("torch loop, all threads", "torch, two processes of one thread"):
        assert (name in found["results"]) != (name in found["skipped"])
    assert found["results"]["three jax.grad calls"]["facts"]["disagreement"] <= 1e-5


@pytest.mark.slow
def test_round_cnn_without_torch_says_so():
    block = "import sys; sys.modules['torch'] = None; from benchmarks.__main__ import main; main(sys.argv[1:])"
    only = ("--only", "jaxpfl, one device", "torch loop, all threads")
    output = python("-c", block, "round_cnn", "--quick", *only).stdout
    assert "jaxpfl, one device" in output
    assert "left out: torch loop, all threads: torch is not installed" in output


@pytest.mark.slow
def test_adaped_flops(tmp_path: Path):
    found = record(tmp_path, "adaped_flops")
    check_contenders(found["results"])
    assert found["ratios"]["work"] == pytest.approx(2.74, abs=0.005)
    assert found["ratios"]["flops_per_second"] == pytest.approx(found["ratios"]["work"] / found["ratios"]["time"])


@pytest.mark.slow
def test_roofline(tmp_path: Path):
    found = record(tmp_path, "roofline")
    check_contenders(found["results"])
    summary = found["summary"]
    assert summary["peak_flops"] == max(summary["products"].values())
    for row in summary["rounds"].values():
        assert row["executed_share"] > row["share"] > 0


@pytest.mark.slow
def test_sweep(tmp_path: Path):
    found = record(tmp_path, "sweep")
    check_contenders(found["results"])
    one, separate = (found["results"][f"2 {how}"]["facts"]["train_losses"] for how in ("in one program", "separate"))
    assert one == pytest.approx(separate, rel=1e-3)  # the same runs


@pytest.mark.slow
def test_sweep_clients(tmp_path: Path):
    found = record(tmp_path, "sweep_clients")
    assert found["programs"] == 2
    assert [row["clients"] for row in found["results"]] == [10, 30]
    for row in found["results"]:
        assert row["status"] == "done"
        assert row["seconds"] > 0
    assert found["peak_bytes"] > 0


@pytest.mark.slow
def test_streamed(tmp_path: Path):
    found = record(tmp_path, "streamed", "--model", "mlp")
    check_contenders(found["results"])
    assert set(found["rates"]) == set(found["results"]) == {"device", "host", "disk"}


@pytest.mark.slow
def test_streamed_draws_curves_over_clients_in_every_place(tmp_path: Path):
    plot = tmp_path / "curves.png"
    found = record(tmp_path, "streamed", "--model", "linear", "--clients", "1", "2", "--plot", str(plot))
    check_contenders(found["results"])
    assert set(found["results"]) == {f"{place}, {m}" for place in ("device", "host", "disk") for m in (20, 40)}
    assert all(row["facts"]["peak_bytes"] > 0 for row in found["results"].values())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_size_of_a_streamed_client_is_that_of_its_model():
    import jax

    from jaxpfl.benchmarks.streamed import KINDS
    from jaxpfl.models import build_model

    for kind in KINDS.values():
        model, x = build_model(kind.name, 10, kind.shape), jax.ShapeDtypeStruct((1, *kind.shape), "float32")
        leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), x))
        assert kind.parameters == sum(leaf.size for leaf in leaves)


def test_curves_of_a_single_count_are_refused(capsys, tmp_path: Path):
    from jaxpfl.benchmarks.__main__ import main

    with pytest.raises(SystemExit):
        main(["streamed", "--clients", "10", "--plot", str(tmp_path / "curves.png")])
    assert capsys.readouterr().err == "error: streamed: argument --plot: give several --clients\n"


@pytest.mark.slow
def test_graphs(tmp_path: Path):
    found = record(tmp_path, "graphs")
    lasso = found["results"]["network lasso"]
    assert set(lasso) == {f"{n}, {kind}" for n in (30, 60) for kind in ("drawn together", "fused")}
    for row in lasso.values():
        for how in ("spectrum", "cg"):
            assert row[how]["error"] < 1e-4
            assert row[how]["median"] > 0
        assert 1 <= row["clusters"] <= 60
    exact = found["results"]["all pairs, 200"]
    assert exact["recall"] == 1
    assert ("pynndescent, 200" in found["results"]) != ("pynndescent" in found["skipped"])
    if "pynndescent, 200" in found["results"]:
        near = found["results"]["pynndescent, 200"]
        assert near["recall"] > 0.99
        assert abs(near["edges"] - exact["edges"]) <= 0.01 * exact["edges"]


@pytest.mark.slow
def test_overhead(tmp_path: Path):
    found = record(tmp_path, "overhead")
    for pair in found["results"].values():
        assert set(pair) == {"round", "bare"}
        check_contenders(pair)
    assert set(found["shares"]) == set(found["results"])


@pytest.mark.slow
def test_compile(tmp_path: Path):
    found = record(tmp_path, "compile")
    for row in found["results"].values():
        phases = [row["round"][name] for name in ("trace", "lower", "xla")]
        assert all(value > 0 for value in phases)
    assert {"fedavg", "adaped", "many_over_few"} <= set(found["ratios"])


@pytest.mark.slow
def test_second_fit(tmp_path: Path):
    found = record(tmp_path, "second_fit")
    cases = {"first", "same", "other", "disk, first", "disk, same", "disk, other"}
    names = {f"{method}, {case}" for method in ("fedavg", "adaped") for case in cases}
    assert set(found["results"]) == names | {"jaxpfl compare, cold", "jaxpfl compare, warm"}
    assert all(row["cpu"] > 0 and row["wall"] > 0 for row in found["results"].values())
    of_fits = {f"{method}, {case}" for method in ("fedavg", "adaped") for case in ("same", "other", "disk, first")}
    assert set(found["ratios"]) == of_fits | {"jaxpfl compare, warm"}


@pytest.mark.slow
def test_fusion(tmp_path: Path):
    found = record(tmp_path, "fusion")
    for problem in found["results"].values():
        assert list(problem) == ["eager", "jit a step", "jit a round", "ten rounds in one call"]
        check_contenders(problem)


@pytest.mark.slow
def test_sums(tmp_path: Path):
    found = record(tmp_path, "sums")
    assert set(found["results"]) == {"equal values", "log-normal values"}
    for rows in found["results"].values():
        rounding = {name: row["error"] for name, row in rows.items()}
        assert rounding.pop("plain loop") > max(rounding.values()) >= 0
        assert len(rounding) == 8
        assert max(rounding.values()) < found["asked"]["floor"]


@pytest.mark.slow
def test_drift(tmp_path: Path):
    found = record(tmp_path, "drift", "--methods", "fedavg")["results"]["fedavg"]
    assert found["rounds"] == [1, 10, 20]
    for distances in (found["distance"], found["shaken"]):
        assert all(0 < distance < 1e-5 for distance in distances)
    assert found["diverged"] == [0, 0]
    assert abs(found["accuracy"][0] - found["accuracy"][1]) < 1e-3


@pytest.mark.slow
def test_drift_of_bfloat16(tmp_path: Path):
    found = record(tmp_path, "drift", "--precision", "bfloat16")["results"]["mlp, fedavg"]
    for distance in found["distance"]:  # half a unit of bfloat16 is 2^-9
        assert 1e-5 < distance < 2**-5
    (exact, _), (other, _) = found["accuracy"]
    assert abs(exact - other) < 0.02


@pytest.mark.slow
def test_processes(tmp_path: Path):
    check_contenders(record(tmp_path, "processes")["results"]["linear"])


@pytest.mark.slow
def test_ragged(tmp_path: Path):
    found = record(tmp_path, "ragged", "--models", "linear")
    assert found["results"]["memory"]["over_examples"] < found["asked"]["memory"]["floor"]
    rows = found["results"]["linear, mini-batches"]
    assert set(rows) == {"equal", "log-normal", "power law", "one of 5000"}
    for row in rows.values():
        assert row["facts"]["round_ms"] > 0
        assert row["facts"]["evaluation_ms"] > 0


@pytest.mark.slow
def test_estimators(tmp_path: Path):
    found = record(tmp_path, "estimators")
    check_contenders(found["results"])
    for row in found["results"].values():
        errors = row["facts"]["errors"]
        assert errors["personalized"] < errors["local"]
        assert row["facts"]["peak_bytes"] > 0


@pytest.mark.slow
def test_interval_coverage(tmp_path: Path):
    for row in record(tmp_path, "interval_coverage")["results"].values():
        assert row["counted_length"] > row["plug_in_length"]
        assert row["counted_coverage"] >= row["plug_in_coverage"]


@pytest.mark.slow
def test_bernoulli_coverage(tmp_path: Path):
    found = record(tmp_path, "bernoulli_coverage", "--variation", "0", "1")["results"]
    (cell,) = found["cells"]
    for of in cell["variation"].values():
        assert 0.8 < of["coverage"] <= 1
        assert 0 < of["length"] < 1
    said = python("-m", "benchmarks", "bernoulli_coverage", "--mean", "0.5", "--variation", "2", status=2).stderr
    assert said.endswith("no Beta distribution has a mean of 0.5 and a variation of 2\n")


@pytest.mark.slow
def test_needles(tmp_path: Path):
    for cell in record(tmp_path, "needles")["results"]["cells"]:
        assert {"local", "normal", "npmle", "known prior"} <= set(cell["errors"])
        assert 0 < cell["bayes_risk"] < cell["soft_threshold"]


def test_the_risk_of_soft_thresholding():
    """Beside SciPy's quadrature of the squared error."""
    from scipy import integrate, stats

    from jaxpfl.benchmarks.needles import soft_threshold

    threshold = math.sqrt(2 * math.log(1000))

    def risk(theta: float) -> float:
        def error(x: float) -> float:
            kept = math.copysign(max(abs(x) - threshold, 0.0), x)
            return (kept - theta) ** 2 * float(stats.norm.pdf(x, theta))

        return integrate.quad(error, theta - 12, theta + 12, points=[-threshold, threshold], limit=200)[0]

    assert soft_threshold(1000, 50, 4.0) == pytest.approx(50 * risk(4.0) + 950 * risk(0.0), rel=1e-8)


@pytest.mark.slow
def test_estimators_compared(tmp_path: Path):
    found = record(tmp_path, "estimators_compared")
    rows = found["results"]
    for label, row in rows.items():
        assert row["rmse"] < row["local_rmse"] or label.startswith("private")
        assert (row["work"] == "private") == ("rmse_stderr" in row)
        assert row["median"] > 0
        assert row["peak_bytes"] > 0
    own = rows["mixed model, jaxpfl, 200"]
    for name in ("plain loop", "statsmodels MixedLM"):
        label = f"mixed model, {name}, 200"
        assert (label in rows) != (label in found["skipped"])
        if label in rows:
            assert rows[label]["rmse"] == pytest.approx(own["rmse"], rel=0.01)
            assert rows[label]["coverage"] == pytest.approx(own["coverage"], abs=0.02)
    for prior, port in (("scale mixture", "ashrink"), ("npmle", "npeb")):
        label = f"{prior}, {port}, 200"
        assert (label in rows) != (label in found["skipped"])
        if label in rows:
            assert rows[label]["rmse"] == pytest.approx(rows[f"{prior}, jaxpfl, 200"]["rmse"], rel=1e-3)
    scipys = [rows[f"point-normal, {name}, 200"]["rmse"] for name in ("SciPy L-BFGS-B", "SciPy on a plain loop")]
    assert scipys == pytest.approx([rows["point-normal, jaxpfl, 200"]["rmse"]] * 2, rel=1e-3)


def test_the_posterior_of_ported_priors():
    """Beside the mixture of a client's posterior on a fine grid of theta."""
    import numpy as np
    from scipy import stats

    from jaxpfl.benchmarks.estimator_ports import posterior

    weights, means, sds = np.array([0.3, 0.0, 0.7]), np.array([0.5, 9.0, -1.0]), np.array([0.0, 1.0, 0.8])
    x, s = np.array([0.2, 1.5, -4.0]), np.array([0.5, 1.0, 2.0])
    grid = np.linspace(-12, 12, 240_001)
    slab = weights[2] * stats.norm.pdf(grid, means[2], sds[2]) * (grid[1] - grid[0])
    for i in range(3):
        mass = slab * stats.norm.pdf(x[i], grid, s[i])
        spike = weights[0] * stats.norm.pdf(x[i], means[0], s[i])
        total = mass.sum() + spike
        below = (np.cumsum(mass) + spike * (grid >= means[0])) / total
        ends = [grid[np.searchsorted(below, p)] for p in (0.025, 0.975)]
        mean, covered = posterior(weights, means, sds, x, s, np.full(3, ends[0] + 0.01))
        assert mean[i] == pytest.approx((mass @ grid + spike * means[0]) / total, rel=1e-6)
        assert covered()[i]
        for theta in (ends[0] - 0.01, ends[1] + 0.01):
            assert not posterior(weights, means, sds, x, s, np.full(3, theta))[1]()[i]


@pytest.mark.slow
def test_histograms(tmp_path: Path):
    plot = tmp_path / "scaling.png"
    found = record(tmp_path, "histograms", "--plot", str(plot))
    check_contenders(found["results"])
    assert plot.stat().st_size > 5000
    for row in found["results"].values():
        assert row["facts"]["sparse_bytes"] > 0


@pytest.mark.slow
def test_adapters(tmp_path: Path):
    found = record(tmp_path, "adapters")["results"]
    assert found["base"]["perplexity"] > 1
    assert found["all parameters shared"]["up"] == found["all parameters shared"]["down"] > 0


@pytest.mark.slow
def test_the_stand_in_has_the_shapes_of_school():
    code = (
        "from benchmarks.silos import federation_of, stand_in; drawn = stand_in(); made = federation_of(drawn, 0); "
        "y = made.train.examples.y; print(*drawn.x.shape, made.num_clients, "
        "made.train.size.sum() + made.test.size.sum(), 0 <= y.min() < y.max() <= 1)"
    )
    assert python("-c", code).stdout.split() == ["15362", "28", "139", "15362", "True"]


@pytest.mark.slow
def test_privacy_chooses_on_examples_set_apart_and_goes_on_where_it_was_interrupted(tmp_path: Path):
    study = ("privacy", "table2", "--programs", "local")
    assert set(record(tmp_path, *study)["results"]) == {"local"}
    found = record(tmp_path, *study, "fedavg", "local-rate", "--also", "1e-6")["results"]  # into the same file
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
    assert "holds another setting" in other.stderr


@pytest.mark.slow
def test_defaults_keeps_every_try_and_goes_on_where_it_was_interrupted(tmp_path: Path):
    two = record(tmp_path, "defaults", "--methods", "perfedavg", "--data", "digits", "mnist")["results"]
    assert set(two) == {"perfedavg"}
    rates = {one["set"]["alpha"] for one in two["perfedavg"]["digits"]["tries"]}
    assert {1e-3, 0.1} < rates  # the paper's value is among the tries
    more = record(tmp_path, "defaults", "--methods", "perfedavg", "fml", "--data", "digits", "mnist")["results"]
    assert more["perfedavg"] == two["perfedavg"]
    for one in more["fml"]["mnist"]["tries"]:
        assert one["accuracy"] == pytest.approx(sum(one["clients"]) / len(one["clients"]), abs=1e-4)


@pytest.mark.slow
def test_adaped_plus_searches_reports_and_ablates(tmp_path: Path):
    results = record(tmp_path, "adaped_plus")["results"]
    assert {row["method"] for row in results["search"]["digits"]} == {"local", "adaped-plus"}
    assert {row["method"] for row in results["reported"]["digits"]} == {"local", "adaped-plus"}
    (without,) = results["ablations"]["digits"]
    assert without["set"]["psi_init"] == 1e6
    assert 0 <= without["accuracy"][0] <= 100


@pytest.mark.slow
def test_robust_runs_every_method_under_attack(tmp_path: Path):
    results = record(tmp_path, "robust")["results"]
    assert set(results) == {"local mean", "ditto mean", "ditto median"}
    assert [row["attack"] for row in results["ditto median"]] == ["none", "label-flip", "sign-flip:factor=3"]


@pytest.mark.slow
def test_private_gain_runs_a_control_and_a_private_method(tmp_path: Path):
    results = record(tmp_path, "private_gain")["results"]
    assert set(results) == {"digits 0 local", "digits 0 FedAvg+"}
    (alone,), (private,) = results.values()
    assert (alone["epsilon"], alone["claimed"]) == (None, None)
    assert 0.99 < private["claimed"] <= private["epsilon"] == 1.0
    assert len(alone["validation"]) == len(private["validation"]) == 6  # as many tries


@pytest.mark.slow
def test_gpu_refuses_a_machine_without_one_and_runs_anywhere_when_told(tmp_path: Path):
    import jax

    if jax.default_backend() == "cpu":
        assert len(python("-m", "benchmarks", "gpu", status=1).stderr.splitlines()) == 1
    found = record(tmp_path, "gpu", "--anywhere", "--only", "adaped", "vmap", "bfloat16")
    assert found["device"]["platform"]
    assert "adaped vmap bfloat16 parameters" in found["results"]
    for row in found["results"].values():
        assert "error" not in row
        assert row["median"] > 0


@pytest.mark.slow
def test_gpu_records_a_configuration_that_fails_and_goes_on(tmp_path: Path):
    found = record(tmp_path, "gpu", "--anywhere", "--only", "linear", "--timeout", "1")
    assert len(found["results"]) == 2
    assert found["not_started"] == []
    assert all("longer than 1 s" in row["error"] for row in found["results"].values())


@pytest.mark.slow
def test_gpu_records_what_a_budget_left(tmp_path: Path):
    found = record(tmp_path, "gpu", "--anywhere", "--only", "linear", "--timeout", "1", "--budget", "1")
    assert len(found["results"]) == len(found["not_started"]) == 1


@pytest.mark.slow
def test_own_models(tmp_path: Path):
    found = record(tmp_path, "own_models")
    check_contenders(found["results"])
    rows = found["summary"]["contenders"]
    for name in ("LeNet linen, products", "LeNet nnx, plain"):
        assert rows[name]["over_built_in"] > 0
    flops = {name: row["facts"].get("flops") for name, row in found["results"].items()}
    # By hand: 30.3 MFLOP a step of twenty without the first layer's input, which this count has.
    forward = 2 * (24 * 24 * 6 * 25 + 8 * 8 * 16 * 150 + 256 * 120 + 120 * 84 + 84 * 10)
    assert flops["cnn"] == flops["LeNet linen, products"] == flops["LeNet nnx, plain"] == 3 * 2 * forward


@pytest.mark.slow
def test_lowered(tmp_path: Path):
    flops = benchmark_module("flops")
    for method, row in record(tmp_path, "lowered")["results"].items():
        assert row["flops"] == pytest.approx(row["steps"] * flops.cnn_step_executed(method), rel=1e-3)
        assert row["seconds"] > row["flops"] / 67e12
        for key, total in (("flops", "flops"), ("bytes", "product_bytes")):
            assert sum(one[key] for one in row["products"]) == pytest.approx(row[total])
        assert [one["flops"] for one in row["products"]] == sorted(
            (one["flops"] for one in row["products"]), reverse=True
        )
