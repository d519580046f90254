"""Deployment by Flower (https://flower.ai): the app's folder, its ClientApp and its ServerApp.

Flower's node ids are random and change when a node restarts. The server therefore asks each new node which client it
is, and recognizes a restarted node by a random name that the node stores in its folder. Flower may start a new process
for each message to a ClientApp, so each node also stores its state and its compiled programs in this folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import __version__
from jaxpfl.core.types import Federation
from jaxpfl.data import stack_clients
from jaxpfl.deploy.agreement import Agreement, encode
from jaxpfl.deploy.parties import Hub, Node, Parcel, write_arrays
from jaxpfl.engine import programs
from jaxpfl.engine.evaluate import milestones
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import partial

_AGREEMENT = "agreement.json"


def write_app(folder: Path, agreement: Agreement, clients: Federation | None = None) -> None:
    """Write the folder of a Flower app, for ``flwr run``.

    Args:
      folder: folder to create.
      agreement: settings and shapes.
      clients: clients of a simulation, whose examples are written to ``FOLDER/clients`` so that the deployment can be
        compared with the simulation; None to write no examples.

    Raises:
      JaxpflError: if the folder exists, or if a setting cannot be deployed.
    """
    if folder.exists():
        raise JaxpflError(f"{folder} already exists: choose another folder")
    words = {"METHOD": agreement.spec.method.name, "CLIENTS": str(agreement.num_clients), "VERSION": __version__}
    stored = agreement.to_json()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial(folder) as place:
        package = place / "federation"
        package.mkdir(parents=True)
        for template in Path(__file__).with_name("app").glob("*.txt"):
            text = template.read_text()
            for word, value in words.items():
                text = text.replace(word, value)
            (place if template.stem == "pyproject.toml" else package).joinpath(template.stem).write_text(text)
        (package / "__init__.py").touch()
        files.write_json(package / _AGREEMENT, stored)
        for row in range(0 if clients is None else clients.num_clients):
            assert clients is not None
            (place / "clients").mkdir(exist_ok=True)
            parts = zip(("train", "validation", "test"), clients.rows([row]).all_splits, strict=True)
            arrays = {
                f"{k}_{name}": a
                for name, part in parts
                for k, a in zip("xy", part.without_persons().flat(), strict=True)
            }
            np.savez(place / "clients" / f"{row}.npz", **arrays)


def client_app(package: Path, load: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Any:
    """Make the ClientApp of a node.

    The node's configuration (``--node-config``) identifies the client by ``partition-id`` (its number, from 0) or by
    ``client`` (its name). The entry ``folder`` names the folder in which the node stores its state.

    Args:
      package: folder of the app's package.
      load: function that maps the node's configuration to the client's arrays (``x_train``, ``y_train``, ...).
    """
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message: Any, context: Any) -> Any:
        kind, config = message.metadata.message_type, dict(context.node_config)
        try:
            sent = _answer(kind, Agreement.from_json(files.read_json(package / _AGREEMENT)), load, config, message)
        except JaxpflError as error:
            sent = {"error": str(error)}, {}
        return Message(_record(sent), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app


def _answer(kind: str, agreement: Agreement, load: Callable[..., Any], config: dict[str, Any], message: Any) -> Parcel:
    """Handle a message at a node, and return the answer."""
    client = config.get("client", config.get("partition-id"))
    if client is None or "folder" not in config:
        raise JaxpflError(
            "--node-config must set folder, and partition-id or client: for example, partition-id=0 folder='/path'"
        )
    folder, loaded, (said, arrays) = Path(str(config["folder"])).absolute(), load(config), _unpack(message)
    (folder / "programs").mkdir(mode=0o700, parents=True, exist_ok=True)
    programs.keep_in(folder / "programs")
    splits = ("train", "test", "validation")
    parts = {name: [(loaded[f"x_{name}"], loaded[f"y_{name}"])] for name in splits if f"x_{name}" in loaded}
    if "train" not in parts:
        raise JaxpflError(f"load must return x_train and y_train, got {', '.join(map(str, loaded)) or 'nothing'}")
    node = Node(agreement, stack_clients(parts["train"], parts.get("test"), parts.get("validation")), folder)
    if kind == "query" and said:
        node.join(said, arrays)
    elif kind == "query":
        return node.offer() | {"client": client, "version": __version__}, {}
    elif kind == "train":
        return {}, node.train(said["round"], arrays)
    else:
        return node.evaluate(said["round"], arrays), {}
    return {}, {}


def server_app(package: Path) -> Any:
    """Make the ServerApp.

    Args:
      package: folder of the app's package.
    """
    from flwr.app import Message
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        def exchange(kind: str, sent: Mapping[int, Parcel], seconds: float) -> dict[int, Parcel]:
            messages = [Message(_record(own), dst_node_id=node, message_type=kind) for node, own in sent.items()]
            found = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages, timeout=seconds)}
            return {n: ({"error": r.error.reason}, {}) if r.has_error() else _unpack(r) for n, r in found.items()}

        agreement = Agreement.from_json(files.read_json(package / _AGREEMENT))
        settings = {name.replace("-", "_"): value for name, value in context.run_config.items()}
        conduct(agreement, grid.get_node_ids, exchange, **settings)

    return app


def _record(parcel: Parcel) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    values, arrays = parcel
    return RecordDict(
        {"values": ConfigRecord(dict(values)), "arrays": ArrayRecord({n: Array(a) for n, a in arrays.items()})}
    )


def _unpack(message: Any) -> Parcel:
    content = message.content
    return dict(content["values"]), {name: array.numpy() for name, array in content["arrays"].items()}


def conduct(
    agreement: Agreement,
    online: Callable[[], Iterable[int]],
    exchange: Callable[[str, Mapping[int, Parcel], float], dict[int, Parcel]],
    *,
    min_clients: int,
    wait_seconds: float,
    round_seconds: float,
    output: str = "",
) -> Hub:
    """Run all rounds of a deployment on the server.

    Args:
      agreement: settings and shapes.
      online: function that returns the ids of the connected nodes.
      exchange: function ``(kind, parcels, seconds) -> answers`` that sends a parcel to each node and waits up to
        ``seconds`` for the answers. Parcels and answers are mappings with node ids as keys; ``kind`` is query, train or
        evaluate.
      min_clients: number of clients that must have joined before the first round.
      wait_seconds: seconds to wait for these clients.
      round_seconds: seconds to wait for the nodes' answers to a message.
      output: folder for the results; "" to write none.

    Returns:
      The server after the last round.

    Raises:
      JaxpflError: if too few clients join; or if, before the first round, a node answers with an error, two nodes claim
        to be the same client, or a node has a different version of jaxpfl. In later rounds, such a node is left out.
    """
    m, spec = agreement.num_clients, agreement.spec
    nodes: dict[int, int] = {}  # client id -> node id
    offers: dict[int, Mapping[str, Any]] = {}
    numbers: dict[str, int] = {}  # client name -> client id, for clients identified by name
    met: set[int] = set()
    begun = False

    def meet() -> list[int]:
        """Ask each new node which client it is, and return the ids of the clients that joined."""
        new, here = [], set(online())
        answers = exchange("query", {node: ({}, {}) for node in here - met}, round_seconds)
        for node, (offer, _) in sorted(answers.items(), key=lambda pair: str(pair[1][0].get("client"))):
            met.add(node)
            name, reason = str(offer.get("client")), offer.get("error")
            free = next(i for i in range(len(nodes) + 1) if i not in nodes)
            client = int(name) if name.isdecimal() else numbers.setdefault(name, free)
            if reason is None and offer["version"] != __version__:
                reason = f"client {name} has jaxpfl {offer['version']}: install {__version__}, as on the server"
            elif reason is None and (client in new or offers.get(client, offer)["instance"] != offer["instance"]):
                reason = f"two nodes claim to be client {name}: give each SuperNode its own partition-id and folder"
            if reason is None:
                nodes[client], offers[client] = node, offer
                new.append(client)
            elif not begun:
                raise JaxpflError(reason)
            else:  # once the run has begun, a faulty node must not end it for the other clients
                print(f"a node is left out: {reason}", flush=True)
        return new

    def send(kind: str, parcels: Mapping[int, Parcel]) -> dict[int, Parcel]:
        """Send messages to clients, and return the answers that are not errors."""
        here, found = set(online()), {}
        given = {nodes[c]: own for c, own in parcels.items() if nodes.get(c) in here}
        answers = exchange(kind, given, round_seconds)
        for client in parcels:
            values, arrays = answers.get(nodes.get(client, -1), ({"error": "no answer"}, {}))
            if "error" in values:
                print(f"client {client} is left out: {values['error']}", flush=True)
            else:
                found[client] = values, arrays
        return found

    until, new = time.monotonic() + wait_seconds, []
    while True:
        new += meet()
        if (count := sum(client < m for client in nodes)) >= min_clients:
            break
        if time.monotonic() > until:
            found = f"{count} of {min_clients} clients joined within {wait_seconds:g} s"
            raise JaxpflError(f"{found}: start the other SuperNodes, or lower min-clients")
        time.sleep(1.0)
    begun, hub = True, Hub(agreement, max(int(offer["steps"]) for client, offer in offers.items() if client < m))
    history, scores, stops = [], {}, set(milestones(0, spec.rounds, spec.eval_every or 0))
    while hub.round < spec.rounds:
        send("query", {client: hub.terms(client) for client in new if client < m})
        cohort, now = hub.cohort(), {"round": hub.round}
        uploads = send("train", dict.fromkeys(cohort, (now, hub.message())))
        history.append(now | hub.finish({client: arrays for client, (_, arrays) in uploads.items()}))
        print(f"{len(uploads)} of {len(cohort)} clients answered: {history[-1]}", flush=True)
        new = meet()
        if hub.round in stops:
            late = [client for client in nodes if client >= m and hub.round == spec.rounds]
            send("query", {client: hub.terms(client) for client in {*new, *late} if client < m or client in late})
            scored = [client for client in nodes if client < m or client in late]
            answers = send("evaluate", dict.fromkeys(scored, ({"round": hub.round}, hub.message())))
            scores = {str(client): dict(own) for client, (own, _) in answers.items()}
            print(f"scores: {scores}", flush=True)
    statement = hub.statement()
    print("no noise was added" if statement is None else statement, flush=True)
    if output:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        privacy = None if statement is None else str(statement)
        files.write_json(folder / "results.json", {"history": history, "scores": scores, "privacy": privacy})
        write_arrays(folder / "server.npz", encode(hub.state))
    return hub
