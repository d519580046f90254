"""The app of Flower: its folder, the server's dealings with nodes that come and go, and a run of real processes."""

import json
import os

import jax
import numpy as np
import pytest
from command import jaxpfl
from loopback import federation as run_app
from test_parties import CLIENTS, SEED, agreed, federation, spec_of

from jaxpfl import __version__
from jaxpfl.deploy import Agreement, Node
from jaxpfl.deploy.flower import conduct, write_app
from jaxpfl.engine.build import simulation_of
from jaxpfl.support.errors import JaxpflError


class Network:
    """Nodes in this process: Flower's node id -> the client's name and its node."""

    def __init__(self, agreement, names, folder):
        self.agreement, self.folder, self.nodes, self.rounds = agreement, folder, {}, []
        for id, name in enumerate(names):
            self.start(100 + id, name)

    def start(self, id, name, place=None):
        row = int(name) if name.isdecimal() else sorted(["a", "b", "c"]).index(name)
        data = federation(CLIENTS + 1).rows([row])
        self.nodes[id] = (name, Node(self.agreement, data, self.folder / (place or f"{id}")))

    def exchange(self, kind, sent, seconds):
        found = {}
        for id, (values, arrays) in sent.items():
            name, node = self.nodes[id]
            if kind == "query" and not values:
                found[id] = node.offer() | {"client": name, "version": __version__}, {}
            elif kind == "query":
                node.join(values, arrays)
                found[id] = {}, {}
            elif kind == "train":
                found[id] = {}, node.train(values["round"], arrays)
            else:
                found[id] = node.evaluate(values["round"], arrays), {}
        if kind == "train":
            self.rounds.append(sorted(self.nodes[id][0] for id in found))
            self.after(len(self.rounds))
        return found

    def after(self, round):
        pass

    def conduct(self, **settings):
        given = {"min_clients": CLIENTS, "wait_seconds": 0.0, "round_seconds": 1.0}
        return conduct(self.agreement, lambda: list(self.nodes), self.exchange, **(given | settings))


def test_nodes_may_come_in_any_order_and_a_new_node_adapts(tmp_path):
    network = Network(agreed("ditto", rounds=2), ["2", "0", "1", "3"], tmp_path)
    network.conduct(output=str(tmp_path / "out"))
    assert network.rounds == [["0", "1", "2"]] * 2
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert sorted(results["scores"]) == ["0", "1", "2", "3"]
    assert results["scores"]["3"]["before.loss"] != results["scores"]["3"]["after.loss"]


def test_nodes_leave_return_with_their_state_and_come_late(tmp_path, capsys):
    network = Network(agreed("ditto", rounds=3), ["0", "1"], tmp_path)
    state = []

    def after(round):
        if round == 1:  # a node is lost, and a client that is late joins
            state.append(network.nodes.pop(101)[1])
            network.start(102, "2")
        if round == 2:  # the lost node is back under another id, and a wrong node does not end the run
            network.start(103, "1", "101")
            network.start(104, "0")

    network.after = after
    network.conduct(min_clients=2)
    assert network.rounds == [["0", "1"], ["0", "2"], ["0", "1", "2"]]
    back = network.nodes[103][1]
    assert back.instance == state[0].instance
    assert int(back._own()[1].participations) == 2
    assert "client 1 is left out: no answer" in (out := capsys.readouterr().out)
    assert "a node is left out: two nodes claim to be client 0" in out


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["0", "1", "1"], "two nodes claim to be client 1: give each SuperNode its own partition-id"),
        (["0", "1"], "2 of 3 clients joined within 0 s: start the other SuperNodes, or lower min-clients"),
    ],
)
def test_a_run_does_not_begin_without_its_clients(tmp_path, names, words):
    with pytest.raises(JaxpflError, match=words):
        Network(agreed(), names, tmp_path).conduct()


def test_command_writes_an_app(tmp_path, capsys):
    app = tmp_path / "app"
    args = ["--method", "fedavg", "--clients", "4", "--model", "linear", "--rounds", "2", "--lr-schedule", "cosine"]
    assert f"flwr run {app} runs fedavg on 4 nodes" in jaxpfl(capsys, "deploy", "flower", app, *args, "--check").out
    stored = json.loads((app / "federation" / "agreement.json").read_text())
    agreement = Agreement.from_json(stored)
    assert (agreement.spec.lr_schedule, agreement.num_clients, agreement.seed) == ("cosine", 4, 0)
    with np.load(app / "clients" / "2.npz") as file:
        assert file["x_train"].shape[1:] == agreement.example.x.shape
    assert "clientapp = " in (app / "pyproject.toml").read_text()
    for path in (app / "federation").glob("*.py"):
        compile(path.read_text(), path.name, "exec")
    again = jaxpfl(capsys, "deploy", "flower", app, *args)
    assert (again.status, again.err) == (2, f"error: {app} already exists: choose another folder\n")
    refused = jaxpfl(capsys, "deploy", "flower", tmp_path / "no", "--method", "pooled", "--clients", "4")
    assert "pooled cannot be deployed: it trains on pooled examples" in refused.err
    assert os.listdir(tmp_path) == ["app"]


@pytest.mark.slow
def test_real_processes_give_the_simulation(tmp_path):
    pytest.importorskip("flwr")  # which the extra "test" installs
    spec, clients = spec_of("adaped", rounds=2), federation(2)
    write_app(tmp_path / "app", Agreement.of(spec, clients, seed=SEED), clients)
    log = run_app(tmp_path / "app", tmp_path / "run", 2, 900, output=f"'{tmp_path / 'out'}'")
    assert (tmp_path / "out" / "results.json").exists(), log
    simulation = simulation_of(spec, clients)
    state, _ = simulation.advance(simulation.init([SEED]), spec.rounds)
    with np.load(tmp_path / "out" / "server.npz") as file:
        for i, leaf in enumerate(jax.tree.leaves(state.server)):
            np.testing.assert_allclose(leaf[0], file[str(i)], atol=1e-5)
    scores = json.loads((tmp_path / "out" / "results.json").read_text())["scores"]
    expected = simulation.evaluate(state)["after"]["loss"][0]
    assert [scores["0"]["after.loss"], scores["1"]["after.loss"]] == pytest.approx(expected.tolist(), abs=1e-5)
