"""A deployment's parties, in one process: their numbers are the simulation's, and what they refuse."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl.algorithms import METHODS
from jaxpfl.deploy import Agreement, Hub, Node
from jaxpfl.deploy.agreement import decode, encode
from jaxpfl.engine.build import assemble_shapes, simulation_of
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.support.errors import JaxpflError

CLIENTS, SEED = 3, 4
PRIVATE = PrivacyConfig(noise_multiplier=2.0, delta=1e-3)


def federation(clients: int = CLIENTS) -> jaxpfl.Federation:
    rng = np.random.default_rng(0)

    def split(n):
        return [(rng.normal(size=(n, 6)).astype(np.float32), rng.integers(0, 3, n)) for _ in range(clients)]

    return jaxpfl.stack_clients(split(8), test=split(4), validation=split(4))


def spec_of(method: str, **settings) -> RunSpec:
    given = {"model": "linear", "rounds": 3, "local_steps": 2, "batch_size": 4, "seeds": [SEED], "num_classes": 3}
    return RunSpec(**(given | {"method": method} | settings))


def agreed(method: str = "fedavg", seed: int | None = SEED, **settings) -> Agreement:
    made = Agreement.of(spec_of(method, **settings), federation(), seed=seed)
    return Agreement.from_json(json.loads(json.dumps(made.to_json())))  # as the app's folder holds it


def check_same_numbers(method: str, folder=None, **settings) -> None:
    clients, spec = federation(), spec_of(method, **settings)
    simulation = simulation_of(spec, clients)
    state, history = simulation.advance(simulation.init([SEED]), spec.rounds)
    agreement = agreed(method, **settings)

    def node(i):
        return Node(agreement, clients.rows([i]), None if folder is None else folder / str(i))

    nodes = [node(i) for i in range(CLIENTS)]
    hub = Hub(agreement, max(one.offer()["steps"] for one in nodes))
    for i, one in enumerate(nodes):
        one.join(*hub.terms(i))
    for round in range(spec.rounds):
        if folder is not None:  # an app is a new process for each message
            nodes = [node(i) for i in range(CLIENTS)]
        sent = hub.message()
        metrics = hub.finish({i: nodes[i].train(round, sent) for i in hub.cohort()})
        assert metrics["train_loss"] == pytest.approx(history["train_loss"][0, round], abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-5), state.server, hub.state)
    scores, sent = simulation.evaluate(state)["after"], hub.message()
    for i, one in enumerate(nodes):
        found = one.evaluate(hub.round, sent)
        for name in ("accuracy", "loss"):
            assert found[f"after.{name}"] == pytest.approx(float(scores[name][0, i]), abs=1e-5)
        assert folder is None or (folder / str(i) / "personal.npz").exists()


@pytest.mark.slow
def test_wrappers_of_the_simulation_are_not_lost():
    kept = {"client_optimizer": "sgd:momentum=0.9", "keep_optimizer": True}
    check_same_numbers("fedavg", lr_schedule="cosine", compress="qsgd:levels=4", cohort=2, **kept)


@pytest.mark.slow
def test_state_of_a_node_is_found_again(tmp_path):
    check_same_numbers("ditto", tmp_path, local_epochs=2)


REFUSED = {
    "pooled": "it trains on pooled examples",
    "fedbuff": "its rounds are asynchronous",
    "network-lasso": "its clients form a graph",
    "fedamp": "its server",
    "cfl": "its server",
    "fedpac": "its server",
    "adamix": "its server uses individual uploads",
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_agreed_upon_or_says_why_not(method):
    if method in REFUSED:
        with pytest.raises(JaxpflError, match=f"{method} cannot be deployed: {REFUSED[method]}"):
            agreed(method, model="mlp-ln:8")
    else:
        assert agreed(method, model="mlp-ln:8").spec.method.name == method


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedbn", "adaped", "fedrep", "ifca", "persfl", "scaffold", "fedproto"])
def test_methods_of_each_kind_give_the_simulation(method):
    """Own layers, a scale, a split model, clusters, teachers, corrections, uploads that are no model."""
    check_same_numbers(method, model="mlp-ln:8", rounds=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aggregate": "median"}, "its server uses individual uploads"),
        ({"dropout": 0.2}, "leave out dropout = 0.2"),
        (
            {"method": "adaped", "options": {"idle_rounds": 1}, "cohort": 2},
            "nodes outside a cohort would need messages",
        ),
        ({"privacy": PRIVATE}, f"seed = {SEED} would let every node compute the noise"),
        ({"privacy": PrivacyConfig(noise_multiplier=2.0, delta=1e-3, unit="example"), "seed": None}, "unit = example"),
        ({"lr": [0.1, 0.2], "seeds": [1, 1]}, "give each hyper-parameter a single value"),
    ],
)
def test_refusals(settings, words):
    with pytest.raises(JaxpflError, match=words):
        agreed(**settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x[:, :5], y), r"training inputs of this node must be float32\['n', 6\]"),
        (lambda x, y: (x, y + 2), "training labels of this node must be below 3"),
        (lambda x, y: (x, y.astype(float) + 0.5), "training labels of this node must be int32"),
    ],
)
def test_a_node_refuses_examples_of_another_kind(change, words):
    x, y = federation().rows([0]).train.flat()
    with pytest.raises(JaxpflError, match=words):
        Node(agreed(), jaxpfl.stack_clients([change(x, y)]))
    empty = federation().rows([0])
    with pytest.raises(JaxpflError, match="no training examples"):
        Node(agreed(), empty._replace(train=empty.train.emptied()))


def test_a_round_goes_on_without_lost_and_wrong_uploads():
    """One node answers, one sends a wrong shape, one infinity; a node outside the run is adapted."""
    agreement, clients = agreed("fedavg-ft", rounds=1), federation(4)
    hub = Hub(agreement, 3)
    nodes = [Node(agreement, clients.rows([i])) for i in range(4)]
    for i, one in enumerate(nodes):
        one.join(*hub.terms(i))
    sent = hub.message()
    good, wrong = nodes[0].train(0, sent), dict(nodes[1].train(0, sent))
    infinite, wrong["0"] = wrong | {"0": wrong["0"] * np.inf}, wrong["0"][:2]
    metrics = hub.finish({0: good, 1: wrong, 2: infinite})
    assert (metrics["participants"], metrics["diverged"]) == (3, 2)
    alone = Hub(agreement, 3)
    alone.finish({0: good})
    jax.tree.map(np.testing.assert_array_equal, hub.state, alone.state)
    assert not np.array_equal(hub.message()["0"], sent["0"])
    before = hub.message()
    hub.finish({})
    jax.tree.map(np.testing.assert_array_equal, before, hub.message())
    scores = nodes[3].evaluate(hub.round, hub.message())
    assert scores["examples"] == 4
    assert scores["before.loss"] != scores["after.loss"]
    with pytest.raises(JaxpflError, match="has not joined"):
        Node(agreement, clients.rows([3])).train(0, sent)


def test_noise_is_of_the_operating_system_and_accounted():
    spec = spec_of("fedavg", privacy=PRIVATE)
    agreement = agreed(seed=None, privacy=PRIVATE)
    hubs = [Hub(agreement, 3) for _ in range(2)]
    for hub in hubs:
        hub.state = hubs[0].state
        hub.finish({})
    first, second = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(hub.state)]) for hub in hubs)
    # The noise lies on a grid: an entry of two draws agrees with a probability below .001, four of 21 below 1e-8.
    assert np.sum(first == second) < 4
    plan = assemble_shapes(spec, agreement.example, CLIENTS).released(1)[0]
    assert hubs[0].statement().epsilon == pytest.approx(plan.statement(1e-3).epsilon)
    assert hubs[0].statement().noise_seed == "secret"
    keys = []
    for _ in range(2):
        node = Node(agreement, federation().rows([0]))
        node.join(*hubs[0].terms(0))
        keys.append(jax.random.key_data(node._key("key")).tolist())
    assert keys[0] != keys[1]


def test_wire():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": [jnp.int32(3), jnp.array([True])]}
    sent = encode(tree)
    assert sent["0"].dtype == np.uint16
    found = decode(sent, jax.eval_shape(lambda: tree), "the tree")
    jax.tree.map(np.testing.assert_array_equal, tree, found)
    with pytest.raises(JaxpflError, match=r"the tree: array 1 must be int32\[\], got float32\[\]"):
        decode(sent | {"1": np.float32(3)}, tree, "the tree")
