"""Graphs made of a federation: who is near whom in data, features and models; what must not matter; the CSV file."""

import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError, LocalWork
from jaxpfl.core.types import ClientData, Examples
from jaxpfl.engine.client_graph import MOST_FEATURES, client_graph, graph_by_inputs, median_distance
from jaxpfl.engine.tasks import make_task
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.setup import prepare, read_graph, write_graph
from jaxpfl.similarity import graphs
from jaxpfl.support.errors import JaxpflWarning

SIZES = (120, 164, 140, 132, 152, 144)
IDS = [7, 3, 12, 0, 5, 9]
KIND = np.array([0, 1, 0, 1, 0, 1])


def federation(of: str, features: int = 3):
    """Two kinds of clients, by turns, that differ in the means of inputs, in one variance, or in labels."""
    rng = np.random.default_rng(4)

    def client(size: int, kind: int):
        x = rng.normal(size=(size, features)) + 2 * kind * (of == "data")
        x[:, 0] *= 1 + 9 * kind * (of == "features")
        y = (x[:, 0] > 0) ^ (kind == 1 and of == "models")
        return x.astype(np.float32), y.astype(np.int32)

    clients = [client(size, kind) for size, kind in zip(SIZES, KIND, strict=True)]
    return jaxpfl.stack_clients(clients, test=clients, client_ids=IDS)


def pairs(graph: graphs.Graph) -> set[tuple[int, int]]:
    return set(zip(np.asarray(graph.first).tolist(), np.asarray(graph.second).tolist(), strict=True))


def whole(graph: graphs.Graph) -> bool:
    """True if the edges are all pairs of clients of one kind, and no others."""
    return pairs(graph) == {(i, j) for j in range(6) for i in range(j) if KIND[i] == KIND[j]}


@pytest.mark.slow
@pytest.mark.parametrize("space", ["data", "features", "models"])
def test_those_that_differ_in_a_space_are_apart_in_it(space):
    given = federation(space)
    task = make_task("linear", given, 2)
    work = LocalWork(np.asarray(given.train.size), 5, 10)
    assert whole(client_graph(space, given, task, work, neighbours=2))


def test_inputs_do_not_show_what_only_labels_tell():
    given = federation("models")
    assert not any(whole(graph_by_inputs(space, given, neighbours=2)) for space in ("data", "features"))


def test_covariances_of_many_features_are_projected():
    assert whole(graph_by_inputs("features", federation("features", MOST_FEATURES + 1), neighbours=2))


@pytest.mark.parametrize("space", ["data", "features"])
def test_padding_order_and_broken_examples_do_not_matter(space):
    given = federation(space)
    want = pairs(graph_by_inputs(space, given, neighbours=1))
    padded = given._replace(train=given.train.bounded(170), test=given.test.bounded(164))
    assert pairs(graph_by_inputs(space, padded, neighbours=1)) == want
    order = np.array([3, 0, 5, 2, 4, 1])
    moved = pairs(graph_by_inputs(space, padded.rows(order), neighbours=1))
    assert {tuple(sorted((int(order[i]), int(order[j])))) for i, j in moved} == want
    broken = given.train.examples.x.copy()
    broken[0] = np.inf
    assert whole(graph_by_inputs(space, given._replace(train=given.train.with_examples(x=broken)), neighbours=2))


def test_the_median_distance():
    def clients(x):
        return ClientData.stacked(Examples(np.array(x)[:, None], np.zeros(4, np.int32)), [2, 2])

    assert median_distance(clients([0.0, 1.0, 3.0, 7.0]), np.array([1, 0])) == pytest.approx(3.5)  # of 1, 2, 3, 4, 6, 7
    assert median_distance(clients([0.0] * 4), np.array([1, 0])) == 1


def test_refusals():
    given = federation("data")
    task, work = make_task("linear", given, 2), LocalWork(np.asarray(given.train.size), 1, 5)
    with pytest.raises(JaxpflError, match="unknown graph 'model': did you mean 'models'"):
        client_graph("model", given, task, work)
    with pytest.raises(JaxpflError, match="neighbors must be at least 1"):
        client_graph("data", given, task, work, neighbours=0)
    tokens = given._replace(train=given.train.with_examples(x=given.train.examples.x.astype(np.int32)))
    with pytest.raises(JaxpflError, match="requires one floating-point array as inputs: use graph = models"):
        graph_by_inputs("data", tokens)


@pytest.mark.slow
def test_fit_makes_a_graph_of_neighbours_or_takes_one():
    given = federation("data")
    options = {"model": "linear", "rounds": 2, "local_steps": 1, "batch_size": 200}
    result = jaxpfl.fit("network-lasso", given, neighbours=2, hyper={"lam": 1e3}, **options)
    np.testing.assert_array_equal(result.clusters, [KIND])
    chain = graphs.from_edges([(0, 1), (1, 2)], 6)
    result = jaxpfl.fit("network-lasso", given, graph=chain, seeds=2, hyper={"lam": 1e3}, **options)
    np.testing.assert_array_equal(result.clusters, [[0, 0, 0, 1, 2, 3]] * 2)
    assert jaxpfl.fit("local", given, **options).clusters is None


def test_fit_refuses_more_neighbours_than_other_clients():
    clients = [(np.ones((3, 2)) * i, np.arange(3)) for i in range(3)]
    given = jaxpfl.stack_clients(clients, test=clients)
    with pytest.raises(JaxpflError, match=r"neighbours must be at most 2 \(the number of other clients\), got 5"):
        jaxpfl.fit("network-lasso", given, neighbours=5, model="linear")


def test_the_file(tmp_path):
    ids, path = np.array(IDS), tmp_path / "graph.csv"
    graph = graphs.from_edges([(0, 1), (1, 4)], 6)
    write_graph(path, graph, ids)
    assert path.read_text().split() == ["client,neighbour", "7,3", "3,5"]
    assert pairs(read_graph(path, ids)) == pairs(graph)
    path.write_text("5, 3\n\n3,5\n7,3\n")
    assert pairs(read_graph(path, ids)) == pairs(graph)
    for text in ("client;neighbour\r\n5;3\r\n7;3", '"from","to"\n3,5\n3,7\n', "5\t3\n7\t3\n"):
        path.write_text(text)
        assert pairs(read_graph(path, ids)) == pairs(graph)
    path.write_text("")
    assert read_graph(path, ids).edges == 0
    for text, line in (("1,2", 1), ("7,3\n7,7", 2), ("a,b\n7", 2), ("7,3\n3;5", 2), ("7,3,1.5", 1)):
        path.write_text(text)
        with pytest.raises(JaxpflError, match=f"line {line} must contain the ids of two different clients"):
            read_graph(path, ids)
    with pytest.raises(JaxpflError, match="cannot read"):
        read_graph(tmp_path / "none.csv", ids)


@pytest.mark.slow
def test_an_experiment_takes_data_unless_told():
    def graph(**changes):
        config = resolve(RunConfig(model="linear", clients=6, rounds=1, neighbours=1, **changes))
        experiment = prepare(config, ("local", "network-lasso"))
        assert experiment.fingerprint()["graph"] is not None
        return pairs(experiment.graph)

    assert graph() == graph(graph="data") != graph(graph="features")
    with pytest.warns(JaxpflWarning, match="graph = features has no effect"):
        assert prepare(resolve(RunConfig(graph="features")), ("local",)).graph is None
