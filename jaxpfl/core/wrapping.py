"""Wrappers of a method's server and clients that forward whatever they do not change.

A wrapper has a state of its own around the method's, and may put something into messages and hyper-parameters; the
method sees neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpfl.core.protocol import Client, ClientContext, Message, Server, ServerContext, Upload
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Splits


def _same(value: Any) -> Any:
    return value


def _unchanged(message: Message, outer: PyTree) -> Message:
    return message


def _forget(outer: PyTree, own: PyTree) -> PyTree:
    return own


def wrapped_server(
    inner: Server,
    *,
    init: Callable[[Key, PyTree, ServerContext], PyTree],
    update: Callable[[Key, PyTree, ServerContext, PyTree, Any], tuple[PyTree, Metrics]],
    state: Callable[[PyTree], PyTree],
    hyper: Callable[[PyTree], PyTree] = _same,
    send: Callable[[Message, PyTree], Message] = _unchanged,
) -> Server:
    """Server with another state around the method's.

    Args:
      inner: the method's.
      init, update: as in `Server`, of the outer state.
      state: ``outer state -> the method's``.
      hyper: ``outer hyper-parameters -> the method's``.
      send: ``(message, outer state) -> message``, for what every message holds besides the method's.
    """

    def broadcast(key: Key, hp: PyTree, ctx: ServerContext, outer: PyTree) -> Message:
        return send(inner.broadcast(key, hyper(hp), ctx, state(outer)), outer)

    predict, greet = inner.predict_global, inner.welcome

    def predict_global(hp: PyTree, outer: PyTree, x: PyTree) -> Array:
        assert predict is not None
        return predict(hyper(hp), state(outer), x)

    def welcome(key: Key, hp: PyTree, ctx: ServerContext, outer: PyTree) -> Message:
        assert greet is not None
        return send(greet(key, hyper(hp), ctx, state(outer)), outer)

    return Server(init, broadcast, update, predict and predict_global, greet and welcome)


def wrapped_client(
    inner: Client,
    *,
    update: Callable[[Key, PyTree, ClientContext, Message, PyTree, Splits], tuple[PyTree, Upload, Metrics]],
    init: Callable[[Key, PyTree, ClientContext, Message], PyTree] | None = None,
    state: Callable[[PyTree], PyTree] = _same,
    keep: Callable[[PyTree, PyTree], PyTree] = _forget,
    hyper: Callable[[PyTree], PyTree] = _same,
    received: Callable[[Message], Message] = _same,
) -> Client:
    """Client with another state, message or hyper-parameters around the method's.

    Args:
      inner: the method's.
      update: as in `Client`, of the outer state, message and hyper-parameters.
      init: the same; None for the method's own state.
      state: ``outer state -> the method's``.
      keep: ``(outer state, the method's new one) -> outer state``, after a round outside the cohort.
      hyper: ``outer hyper-parameters -> the method's``.
      received: ``outer message -> the method's``.
    """

    def own_init(key: Key, hp: PyTree, ctx: ClientContext, message: Message) -> PyTree:
        return inner.init(key, hyper(hp), ctx, received(message))

    def personalize(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, outer: PyTree, splits: Splits
    ) -> PyTree:
        return inner.personalize(key, hyper(hp), ctx, received(message), state(outer), splits)

    def predict(hp: PyTree, personal: PyTree, x: PyTree) -> Array:
        return inner.predict(hyper(hp), personal, x)

    alone, choose, gradients = inner.idle, inner.cluster, inner.gradients

    def idle(key: Key, hp: PyTree, ctx: ClientContext, outer: PyTree, splits: Splits) -> tuple[PyTree, Metrics]:
        assert alone is not None
        own, metrics = alone(key, hyper(hp), ctx, state(outer), splits)
        return keep(outer, own), metrics

    def cluster(hp: PyTree, message: Message, outer: PyTree, splits: Splits) -> Array:
        assert choose is not None
        return choose(hyper(hp), received(message), state(outer), splits)

    if gradients is not None:
        count = gradients.update
        gradients = gradients._replace(update=lambda steps, message: count(steps, received(message)))
    return Client(init or own_init, update, personalize, predict, alone and idle, choose and cluster, gradients)
