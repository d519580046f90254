"""Precision of products, as a setting of the plan and outside rounds: what it lowers, and what stays float32."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError, fit
from jaxpfl.benchmarks.studies import regression_model as regression
from jaxpfl.core import full_precision
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.execution_plan import explain, resolve
from jaxpfl.engine.spec import RunSpec
from jaxpfl.estimators import base
from jaxpfl.estimators.empirical_bayes import ebnm, homogeneity
from jaxpfl.estimators.histograms import private
from jaxpfl.estimators.histograms.base import from_sparse
from jaxpfl.privacy import Mechanism
from jaxpfl.runs import config as configs


def products(text: str) -> list[tuple[str, str]]:
    """Precision and operand type of each product."""
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    found = [(re.search(r"precision = \[(\w+)", line), re.search(r"\(tensor<[\dx]*x(\w+)>", line)) for line in lines]
    assert all(kind for _, kind in found)
    return [(how[1] if how else "DEFAULT", kind[1]) for how, kind in found if kind]


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3)


def simulate(federation, precision, privacy=None):
    given = {"model": "mlp:16", "local_steps": 2, "num_classes": 10}
    plan = ExecutionPlan(devices=1, precision=precision)
    return simulation_of(RunSpec(method=jaxpfl.METHODS["fedavg"], privacy=privacy, plan=plan, **given), federation)


@pytest.mark.slow
def test_products_have_the_precision_and_nothing_else_changes_its_type(federation):
    privacy = Mechanism(1.0, 1.0)
    programs = {name: simulate(federation, name, privacy) for name in ("float32", "tf32", "bfloat16")}
    found = {
        (name, platform): set(products(one.export(platform).mlir_module()))
        for name, one in programs.items()
        for platform in ("cpu", "cuda")
    }
    assert found["float32", "cpu"] == found["tf32", "cpu"] == {("DEFAULT", "f32")}
    assert found["float32", "cuda"] == {("HIGHEST", "f32")}
    assert found["tf32", "cuda"] == {("HIGH", "f32")}
    assert {kind for _, kind in found["bfloat16", "cuda"]} == {kind for _, kind in found["bfloat16", "cpu"]} == {"bf16"}
    for name in ("float32", "bfloat16"):
        state = programs[name].init([0])
        assert {leaf.dtype for leaf in jax.tree.leaves((state.server, state.clients))} <= {jnp.dtype("float32")}
    # Clipping and noise have neither products nor bfloat16: the lines with it are as many as without privacy.
    texts = [simulate(federation, "bfloat16", p).export("cuda").mlir_module() for p in (None, privacy)]
    assert len({text.count("bf16") for text in texts}) == 1


@pytest.mark.slow
def test_bfloat16_is_near_and_tf32_is_float32_on_a_cpu(federation):
    given = {"model": "mlp:16", "rounds": 3, "local_steps": 3}
    results = [
        fit("fedavg", federation, **given, plan=ExecutionPlan(precision=precision))
        for precision in ("float32", "tf32", "bfloat16")
    ]
    losses = [result.history["train_loss"] for result in results]
    np.testing.assert_array_equal(losses[0], losses[1])
    assert np.abs(losses[0] - losses[2]).max() > 0
    np.testing.assert_allclose(losses[0], losses[2], rtol=2e-2)


def test_the_plan_says_what_it_lowers():
    given = {"cohort": 5, "num_clients": 5, "model_bytes": 100}
    last = {
        (precision, platform): explain(resolve(ExecutionPlan(precision=precision), **given, platform=platform))[-1]
        for precision in ("float32", "tf32", "bfloat16")
        for platform in ("cpu", "cuda")
    }
    assert last["float32", "cuda"][0] == "seeds and settings"
    assert last["tf32", "cpu"] == ("precision of products", "float32", "a CPU has no tf32")
    assert last["tf32", "cuda"][1] == "tf32"
    assert last["bfloat16", "cpu"][1] == "bfloat16"
    with pytest.raises(JaxpflError, match=r"plan\.precision must be float32, tf32 or bfloat16, got 'float16'"):
        ExecutionPlan(precision="float16")  # pyright: ignore[reportArgumentType]


def test_a_precision_of_ones_own_for_jax_is_kept():
    given = {"cohort": 5, "num_clients": 5, "model_bytes": 100, "platform": "cuda"}
    assert resolve(ExecutionPlan(), **given).matmul == "float32"
    with jax.default_matmul_precision("tensorfloat32"):
        assert resolve(ExecutionPlan(), **given).matmul is None


def test_a_task_of_another_precision_is_refused(federation):
    task = jaxpfl.classification(jaxpfl.models.build_model("linear", 10, (8, 8, 1)), (8, 8, 1), 10)
    work = jaxpfl.LocalWork(np.asarray(federation.train.size), 1, 2)
    algorithm, cohorts = jaxpfl.METHODS["local"].build(task, work), jaxpfl.participation.full(4)
    hyper = jaxpfl.METHODS["local"].hyper
    with pytest.raises(JaxpflError, match=r"requires a bfloat16 model: use jaxpfl\.models\.in_bfloat16"):
        jaxpfl.Simulation(algorithm, task, federation, cohorts, hyper, plan=ExecutionPlan(precision="bfloat16"))


def test_a_run_keeps_its_precision_and_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    default = configs.RunConfig()
    half = configs.RunConfig(plan=ExecutionPlan(precision="bfloat16"))
    blocks = configs.RunConfig(plan=ExecutionPlan(clients="map"))
    old, new, other = map(configs.to_json, (default, half, blocks))
    assert configs.differences(old, new)[0] == ["plan.precision: float32 -> bfloat16"]
    assert configs.differences(old, other)[0] == []
    older = old | {"plan": {name: value for name, value in old["plan"].items() if name != "precision"}}
    assert configs.differences(older, old) == ([], [])
    folders = [configs.default_folder("run", config, ("fedavg",), False) for config in (default, half, blocks)]
    assert folders[0] == folders[2] != folders[1]


PACKAGE = Path(jaxpfl.__file__).parent


def precisions(lowered):
    """Precision of each product of a lowered program."""
    return [how for how, _ in products(lowered.as_text())]


def test_the_first_states_have_the_precision_of_the_platform():
    """FedAMP's clients start from what the server sends, which it computes by products."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(5, 4)).astype(np.float32), rng.integers(3, size=5)) for _ in range(3)]
    spec = RunSpec(method=jaxpfl.METHODS["fedamp"], model="linear")
    simulation = simulation_of(spec, jaxpfl.stack_clients(clients, test=clients))
    found = {}
    for platform in ("cpu", "cuda"):
        programs, (_, values, own, _) = simulation._on(platform, 1)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        found[platform] = precisions(jax.jit(programs.function("start", 3)).lower((keys, None), values.hp, own))
    assert set(found["cpu"]) == {"DEFAULT"}
    assert found["cuda"] == ["HIGHEST"] * len(found["cpu"])


def test_estimators_have_full_products_and_a_precision_of_ones_own_for_jax_is_kept():
    rng = np.random.default_rng(0)
    x, theta = rng.normal(size=(4, 5, 3)).astype(np.float32), np.ones(3, np.float32)
    y = x @ theta
    population = regression.Population(jnp.zeros(3), jnp.asarray(1.0), jnp.asarray(1.0))

    def coefficients():
        return jax.jit(lambda x, y: regression.em(population, jax.vmap(regression.rotate)(x, y), 1e-6, 2)).lower(x, y)

    assert set(precisions(coefficients())) == {"HIGHEST"}
    users = from_sparse(np.array([0, 2, 3]), np.array([0, 2, 1]), np.array([4, 1, 2]), 3)
    assert set(precisions(jax.jit(private.clipped_sums).lower(users, np.eye(3), 0.5))) == {"HIGHEST"}
    with jax.default_matmul_precision("bfloat16"):
        assert set(precisions(coefficients())) == {"DEFAULT"}
    assert jax.config.jax_default_matmul_precision is None  # pyright: ignore[reportAttributeAccessIssue]


ASKED = {
    "mean of a prior": lambda found, t: found.prior.mean,
    "spread of a prior": lambda found, t: found.prior.sd,
    "residuals": lambda found, t: found.prior.marginal_below(t, found.s),
    "homogeneity": lambda found, t: homogeneity(t, np.ones(20, np.float32)),
}
"""Answers that are computed when they are asked for, outside of any program of ours."""


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_an_answer_is_asked_later_has_full_products(asked):
    t = np.linspace(-1, 2, 20, dtype=np.float32)
    found = ebnm(t, 0.5, prior="npmle")
    assert set(precisions(jax.jit(asked).lower(found, t))) == {"HIGHEST"}


def test_our_own_precision_is_not_taken_for_the_users():
    assert full_precision.products(full_precision.users_own)() is False
    with jax.default_matmul_precision("tensorfloat32"):
        assert full_precision.products(full_precision.users_own)() is True


def test_whatever_an_estimator_computes_by_products_has_full_ones():
    twice = base.Estimator(
        summarize=lambda key, shared, own: (own.x.T @ own.x, own),
        combine=lambda key, shared, message, sent: message.mean(axis=0),
        personalize=lambda shared, message, sent, own: shared @ shared,
    )
    clients = base.every(jnp.ones((2, 3, 2)))
    assert precisions(jax.jit(partial(base.estimate, twice)).lower(jax.random.key(0), clients)) == ["HIGHEST"] * 2


@pytest.mark.parametrize("folder", ["estimators", "similarity", "studies"])
def test_what_is_compiled_outside_rounds_is_compiled_so(folder):
    texts = {path: path.read_text() for path in sorted((PACKAGE / folder).rglob("*.py"))}
    assert any("full_precision.jit" in text for text in texts.values()) or folder == "similarity"  # on the host
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert [line for line in lines if re.search(r"\bjax\.jit\b", line) and not _is_prose(line)] == []


def _is_prose(line: str) -> bool:
    """True of an example, and where a docstring names ``jax.jit``."""
    return line.strip().startswith(">>>") or "`" in line
