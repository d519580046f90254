"""The two parties of a deployment: the `Node` of each client, and the `Hub`, which is the server.

Node and hub call the functions of a simulated round. If the agreement has a seed, they also use the same random keys as
the simulation. A node's examples and state never leave the node. All messages are dictionaries of NumPy arrays, numbers
and strings, so that any transport can carry them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.parts.schedules import unscheduled
from jaxpfl.core import trees
from jaxpfl.core.participation import RELIABLE, Participation
from jaxpfl.core.protocol import Algorithm, Client, Message, Reduced, Server
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import NO_LABEL, Array, ClientData, Federation, Key, Metrics, PyTree, Splits
from jaxpfl.data import scaled
from jaxpfl.deploy.agreement import Agreement, decode, encode
from jaxpfl.engine import programs
from jaxpfl.engine.build import assemble_shapes
from jaxpfl.engine.evaluate import Today, adapt_client, personalize_client, score_client
from jaxpfl.engine.round import broadcast, summable, take_part, update_server
from jaxpfl.engine.state import Counts, init_client, init_server, number, server_context
from jaxpfl.models import Task
from jaxpfl.privacy import PrivacyConfig, PrivacyPlan, Statement
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

Arrays = Mapping[str, np.ndarray]
"""An encoded pytree (`encode`), or several arrays by name."""
Parcel = tuple[Mapping[str, Any], Arrays]
"""Content of a message: numbers and strings by name, and arrays by name."""


class Node:
    """One client of a deployment, with its examples and its state.

    Attributes:
      instance: random name, stored in the node's folder, by which the server recognizes a restarted node.
      client_id: id of the client; None before `join`. Clients that take part in training have ids below m, the number
        of clients in the agreement.
    """

    def __init__(self, agreement: Agreement, data: Federation, folder: Path | None = None):
        """Check the examples, and read the node's state if the folder has one.

        Args:
          agreement: settings and shapes.
          data: examples of this client alone, with inputs that are not scaled yet.
          folder: folder of the node's state and personalized model; None to keep the state in memory.

        Raises:
          JaxpflError: if there are no training examples, or if the examples' shapes, dtypes or labels do not fit the
            agreement.
        """
        self._agreement, self._folder = agreement, folder
        self._data = jax.tree.map(jnp.asarray, _checked(agreement, data))
        self._kept: dict[str, np.ndarray] = {"instance": np.array(os.urandom(16).hex()), "run": np.array("")}
        if folder is not None and (folder / "state.npz").exists():
            with np.load(folder / "state.npz", allow_pickle=False) as file:
                self._kept = dict(file)
        self.instance = str(self._kept["instance"])
        self.client_id = int(self._kept["client_id"]) if self._kept["run"] else None

    def offer(self) -> dict[str, Any]:
        """Return what the hub needs before the run: `instance`, and the number of local steps for the node's data."""
        agreement = self._agreement
        work = assemble_shapes(agreement.spec, agreement.example, agreement.num_clients, self._sizes).work
        self._save()
        return {"instance": self.instance, "steps": work.steps}

    def join(self, terms: Mapping[str, Any], arrays: Arrays) -> None:
        """Initialize the client's state from the result of `Hub.terms`, unless the node has joined this run before."""
        if (str(self._kept["run"]), self.client_id) == (terms["run"], terms["client_id"]):
            return
        self.client_id, seed = terms["client_id"], self._agreement.seed
        key = _secret() if seed is None else jax.random.key(seed)
        self._kept = {name: np.asarray(value) for name, value in terms.items()} | {"start": arrays["start"]}
        self._kept |= {"instance": np.array(self.instance), "key": np.asarray(jax.random.key_data(key))}
        self.__dict__.pop("_client", None)
        if self.client_id < self._agreement.num_clients:
            state = _call(partial(init_client, self._client[1]), *self._beginning, self._message(arrays))
            self._keep((state, Counts.row()))
        self._save()

    def train(self, round: int, arrays: Arrays) -> dict[str, np.ndarray]:
        """Run one round of the client, and return its upload and metrics, encoded for `Hub.finish`.

        Args:
          round: number of finished rounds.
          arrays: result of `Hub.message` for this round.
        """
        algorithm, client, hp = self._client
        part = partial(take_part, algorithm, client, RELIABLE, None, self._agreement.assembled.cohorts.capacity)
        data = self._data.splits.client(0), jnp.int32(self.client_id), None, None
        shared = (self._key("key"),) * 2, jnp.int32(round), hp, RELIABLE.rates, self._message(arrays).shared
        done = _call(part, shared, jnp.array(True), self._own(), data)
        self._keep(done.state)
        self._save()
        return encode(done.summed)

    def evaluate(self, round: int, arrays: Arrays) -> dict[str, float]:
        """Personalize the client's model, store it in the node's folder, and score it on the client's test examples.

        A client that does not take part in training is instead adapted for ``adapt_rounds`` rounds from the current
        message, and its personalized model is not stored.

        Returns:
          The scores by name, such as ``after.accuracy``, and the number of test examples as ``examples``.
        """
        (algorithm, client, hp), sent, task = self._client, self._message(arrays).shared, self._agreement.assembled.task
        data, test = self._data.splits.client(0), self._data.test.client(0)
        today, client_id = Today(self._key("key"), jnp.int32(round), hp, None, sent), jnp.int32(self.client_id)
        if self.client_id is not None and self.client_id >= self._agreement.num_clients:
            rounds = jnp.int32(self._agreement.spec.adapt_rounds)
            today = today._replace(hp=unscheduled(hp), rounds=rounds, start=self._key("start"))
            adapt = partial(adapt_client, algorithm, task, None, client)
            scores = _call(adapt, today, (), (data, test, client_id))
        else:
            score = partial(_score, algorithm, client, task)
            personal, scores = _call(score, today, self._own()[0], data, test, client_id)
            if self._folder is not None:
                paths = {"/".join(trees.names(path)): leaf for path, leaf in jax.tree.leaves_with_path(personal)}
                plain = {n: np.asarray(a, np.float32 if a.dtype == jnp.bfloat16 else None) for n, a in paths.items()}
                write_arrays(self._folder / "personal.npz", plain)
        named = {f"{model}.{name}": float(value) for model, own in scores.items() for name, value in own.items()}
        return named | {"examples": float(test.size)}

    @property
    def _sizes(self) -> tuple[int, int]:
        return int(self._data.train.size[0]), int(self._data.validation.size[0])

    def _key(self, name: str) -> Key:
        return jax.random.wrap_key_data(jnp.asarray(self._kept[name]))

    @cached_property
    def _client(self) -> tuple[Algorithm, Client, PyTree]:
        """Algorithm for this node's numbers of examples, its `Client` functions, and the hyper-parameters."""
        if self.client_id is None:
            raise JaxpflError("the node has not joined a run: its state is missing")
        agreement, steps = self._agreement, int(self._kept["steps"])
        given = agreement.spec, agreement.example, agreement.num_clients, self._sizes, steps
        algorithm, hp = assemble_shapes(*given).algorithm()
        algorithm.check_data(self._data)
        groups, group = len(algorithm.clients), 0
        if groups > 1:
            group = int(algorithm.group_of(np.array([self.client_id]), groups)[0])
        # The global model needs the server's state, which nodes do not have.
        server = algorithm.server._replace(predict_global=None)
        return algorithm._replace(server=server), algorithm.clients[group], jax.tree.map(number, hp)

    @property
    def _beginning(self) -> tuple[Key, Key, PyTree, Array]:
        """Keys, hyper-parameters and client id, in the order in which `init_client` takes them."""
        return self._key("start"), self._key("key"), self._client[2], jnp.int32(self.client_id)

    def _message(self, arrays: Arrays) -> Message:
        return decode(arrays, self._agreement.message, "the message of the server")

    def _own(self) -> tuple[PyTree, Counts]:
        state = programs.shapes(partial(init_client, self._client[1]), *self._beginning, self._agreement.message)
        kept = {name.removeprefix("own/"): array for name, array in self._kept.items()}
        return decode(kept, (state, jax.eval_shape(Counts.row)), "the node's state")

    def _keep(self, own: tuple[PyTree, Counts]) -> None:
        self._kept |= {f"own/{name}": array for name, array in encode(own).items()}

    def _save(self) -> None:
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the state contains the noise's key
            write_arrays(self._folder / "state.npz", self._kept)


class Hub:
    """The server of a deployment.

    Attributes:
      round: number of finished rounds.
      run: random name of the run.
      state: the method's server state.
    """

    def __init__(self, agreement: Agreement, steps: int):
        """Start a run.

        Args:
          agreement: settings and shapes.
          steps: largest number of local steps that any node offers (`Node.offer`).
        """
        self._agreement, self._steps, seed = agreement, steps, agreement.seed
        self.assembled = assemble_shapes(agreement.spec, agreement.example, agreement.num_clients, steps=steps)
        algorithm, hp = self.assembled.algorithm()
        self._server, self._hp, self._cohorts = algorithm.server, jax.tree.map(number, hp), self.assembled.cohorts
        self.round, self.run = 0, os.urandom(16).hex()
        self._key = _secret() if seed is None else jax.random.key(seed)
        self._released = _secret() if seed is None else self._key
        begin = partial(init_server, algorithm.server, ctx=server_context(self._cohorts, 0))
        self.state, message = _call(begin, self._key, self._hp)
        self._first = encode(message)
        upload = partial(_upload, algorithm, self._cohorts.capacity)
        self._expected = programs.shapes(upload, self._key, self._hp, self.assembled.federation, message)

    def terms(self, client_id: int) -> Parcel:
        """Return the arguments of `Node.join` for a client.

        They contain the server's message of round 0, even if the client joins in a later round. Clients that do not
        take part in training (their ids are at least m) get the message of the current round instead.
        """
        start = np.asarray(jax.random.key_data(stream(self._key, Purpose.CLIENT_INIT)))
        message = self._first if client_id < self._agreement.num_clients else self.message()
        return {"run": self.run, "client_id": client_id, "steps": self._steps}, {"start": start, **message}

    def message(self) -> dict[str, np.ndarray]:
        """Return the server's message for the current round, encoded."""
        send = partial(_send, self._server, self._cohorts)
        return encode(_call(send, self._key, self._hp, jnp.int32(self.round), self.state))

    def cohort(self) -> list[int]:
        """Draw the current round's cohort, and return its client ids in increasing order."""
        m = self._cohorts.num_clients
        rows = self._cohorts.rows(self._released, jnp.int32(self.round), jnp.arange(m, dtype=jnp.int32))
        return [row for row in np.asarray(rows).tolist() if row < m]

    def finish(self, uploads: Mapping[int, Arrays]) -> dict[str, float]:
        """Update the server with the uploads that arrived, and end the round.

        An upload with a wrong shape or dtype, or with numbers that are not finite, is left out and counted as diverged.

        Args:
          uploads: results of `Node.train` by client id.

        Returns:
          The round's metrics, as in a simulation.
        """
        total, refused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._expected), 0
        for client in sorted(uploads):  # the order of a simulation's sum, for the same rounding
            try:
                sent = decode(uploads[client], self._expected, f"the upload of client {client}")
            except JaxpflError:
                refused += 1
                continue
            usable = bool(trees.all_finite(sent[0]) & summable(sent[0], self._cohorts.capacity) & (sent[1] < 2))
            refused += not usable
            total = jax.tree.map(jnp.add, total, sent) if usable else total
        update = partial(_update, self._server, self._cohorts)
        keys = self._key, self._released
        self.state, metrics = _call(update, keys, self._hp, jnp.int32(self.round), self.state, total)
        self.round += 1
        lost = {"participants": refused, "diverged": refused}
        return {name: float(value) + lost.get(name, 0) for name, value in metrics.items()}

    def statement(self) -> Statement | None:
        """Return the privacy guarantee for all rounds of the run, or None if no noise is added."""
        plan, asked = (self.assembled.released(1) or (None,))[0], self._agreement.spec.privacy
        if not isinstance(plan, PrivacyPlan) or not isinstance(asked, PrivacyConfig) or asked.delta is None:
            return None
        return plan.statement(asked.delta, asked.accountant)._replace(noise_seed="secret")


def _call(function: Callable[..., Any], *given: Any) -> Any:
    """Compile and call a function. Compiled programs are kept on disk, because each message may start a new process."""
    given = jax.tree.map(jnp.asarray, given)
    return programs.compiled(function, given)(*given)


def _send(server: Server, cohorts: Participation, key: Key, hp: PyTree, round: Array, state: PyTree) -> Message:
    return broadcast(server, key, hp, server_context(cohorts, round), state)


def _update(
    server: Server, cohorts: Participation, keys: tuple[Key, Key], hp: PyTree, round: Array, state: PyTree, total: Any
) -> tuple[PyTree, Metrics]:
    """Update the server with the sum of the nodes' results; return its state and the round's metrics."""
    packed, contributors, done, tally = total
    upload, ctx = packed.unpack(), server_context(cohorts, round)
    reduced = Reduced(upload.total, upload.weight, contributors)
    shared = broadcast(server, keys[0], hp, ctx, state).shared
    new, sound, metrics = update_server(server, None, keys[1], hp, ctx, state, reduced, shared)
    tallied = {"participants": tally.clients, "diverged": jnp.where(sound, tally.diverged, tally.clients)}
    return new, done.means() | metrics | tallied


def _upload(algorithm: Algorithm, slots: int, key: Key, hp: PyTree, data: Federation, message: Message) -> PyTree:
    """Run the first round of one client. The hub does not run this function; it only needs the shapes of the result."""
    client, zero = algorithm.clients[0], jnp.int32(0)
    own = init_client(client, key, key, hp, zero, message), Counts.row()
    shared, given = ((key, key), zero, hp, RELIABLE.rates, message.shared), (data.splits.client(0), zero, None, None)
    return take_part(algorithm, client, RELIABLE, None, slots, shared, jnp.array(True), own, given).summed


def _score(
    algorithm: Algorithm, client: Client, task: Task, today: Today, own: PyTree, data: Splits, test: ClientData, id: Any
) -> tuple[PyTree, Mapping[str, Metrics]]:
    """Return one client's personalized model, and the scores of its models."""
    personal = personalize_client(None, client, today, id, None, own, data)
    return personal.after, score_client(algorithm, client, task, today, personal, test)


def _secret() -> Key:
    """Draw a random key from the operating system."""
    shape = jax.random.key_data(jax.random.key(0)).shape
    drawn = np.frombuffer(os.urandom(4 * int(np.prod(shape))), np.uint32).reshape(shape)
    return jax.random.wrap_key_data(jnp.asarray(drawn))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an .npz file atomically: a process that is killed leaves either the old or the new file."""
    with files.whole(path, "wb") as file:
        np.savez(file, **arrays)


def _checked(agreement: Agreement, data: Federation) -> Federation:
    """Check a node's examples against the agreement, and scale their inputs.

    Raises:
      JaxpflError: as in `Node`.
    """
    if not int(data.train.size[0]):
        raise JaxpflError("this node has no training examples: leave it out of the deployment")
    data = data._replace(train=data.train.without_persons())
    data = data if agreement.scaling is None else scaled(data, agreement.scaling)
    task = agreement.assembled.task
    for name, split in zip(("training", "validation", "test"), data.all_splits, strict=True):
        for kind, leaf, agreed in zip(("inputs", "labels"), split.examples, agreement.example, strict=True):
            found, needed = (
                f"{a.dtype}{['n', *shape]}" for a, shape in ((leaf, leaf.shape[1:]), (agreed, agreed.shape))
            )
            if found != needed:
                raise JaxpflError(f"{name} {kind} of this node must be {needed}, got {found}")
        labels = split.flat().y
        if task.has_classes and ((labels >= task.num_classes) | (labels < NO_LABEL)).any():
            raise JaxpflError(f"{name} labels of this node must be below {task.num_classes}, got {labels.max()}")
    return data
