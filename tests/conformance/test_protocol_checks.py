"""A method that breaks the protocol is refused with one line that says where, and the checks cost nothing."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from problem import simulate

from jaxpfl import (
    Algorithm,
    Client,
    ExecutionPlan,
    Gradients,
    JaxpflError,
    Message,
    Method,
    Reduction,
    SgdHyper,
    Simulation,
    Upload,
)
from jaxpfl.algorithms.parts.servers import averaging_server
from jaxpfl.core import protocol


def toy(**wrong) -> Method:
    """Clients that remember a vector and upload zeros; what is wrong with it replaces what a function returns."""

    def build(task, work):
        def update(key, hp, ctx, message, state, splits):
            total = wrong.get("total", lambda a: a)(jax.tree.map(jnp.zeros_like, message.shared))
            own = wrong.get("state", lambda a: a)(state)
            upload = Upload(total, wrong.get("weight", jnp.ones(())))
            return wrong.get("update", lambda *a: a)(own, upload, wrong.get("metrics", {}))

        def server_update(key, hp, ctx, mu, reduced):
            if "served" in wrong:
                return wrong["served"](mu, reduced)
            return wrong.get("server", lambda a: a)(optax.apply_updates(mu, reduced.mean())), {}

        own_model = wrong.get("personalize", lambda ctx, mu: mu)
        client = Client(
            init=lambda key, hp, ctx, message: {"seen": jnp.zeros(3), "rounds": jnp.int32(0)},
            update=update,
            personalize=lambda key, hp, ctx, message, state, splits: own_model(ctx, message.shared),
            predict=wrong.get("predict", lambda hp, mu, x: task.model.apply(mu, x)),
            idle=lambda key, hp, ctx, state, splits: (wrong.get("idle", lambda a: a)(state), {}),
            gradients=wrong.get("gradients"),
        )
        server = averaging_server(task)
        sent = wrong.get("sent", lambda message: message)
        server = server._replace(broadcast=lambda key, hp, ctx, mu: sent(Message(mu)))
        if not wrong.get("averaging"):
            server = server._replace(update=server_update)
        return Algorithm((client,), server, work.steps, wrong.get("reduction", Reduction.SUM), idle_cap=1)

    return Method("toy", build, SgdHyper())


def trace(method: Method, federation, program: str = "advance") -> jax.stages.Traced:
    """A program, the round's unless given, traced and no more."""
    simulation: Simulation = simulate(method, federation, model="linear", plan=ExecutionPlan(devices=1))
    return traced(simulation, program)


def traced(simulation: Simulation, program: str) -> jax.stages.Traced:
    return jax.jit(simulation._programs.function(program, 1)).trace(*simulation._arguments(program, 1))


def scalars(tree):
    return jax.tree.map(lambda a: a.sum(), tree)


def keeping(**changed):
    return lambda state: state | changed


INNER = {"total": lambda total: {"inner": total}}
WRONG = {
    "a state of another shape": (
        {"state": keeping(seen=jnp.zeros(()))},
        r"client.update: state['seen'] is float32[], but client.init's state['seen'] is float32[3]",
    ),
    "a state of another dtype": (
        {"state": keeping(seen=jnp.arange(3))},
        "client.update: state['seen'] is int32[3], but client.init's state['seen'] is float32[3]",
    ),
    "a leaf more": (
        {"state": keeping(new=jnp.zeros(()))},
        "client.update: state differs in structure from client.init's state: it has a leaf ['new']",
    ),
    "a leaf less": ({"state": lambda state: {"seen": state["seen"]}}, "state: it lacks the leaf ['rounds']"),
    "no array": ({"state": keeping(rounds=4)}, "client.update: state['rounds'] must be an array, got 4"),
    "an idle client's state": (
        {"idle": scalars},
        "client.idle: state['seen'] is float32[], but client.init's state['seen'] is float32[3]",
    ),
    "two values": (
        {"update": lambda state, upload, metrics: (state, upload)},
        "client.update must return (state, Upload, metrics), got 2 values",
    ),
    "one value": ({"update": lambda state, upload, metrics: upload.total}, "(state, Upload, metrics), got a dict"),
    "no upload": ({"update": lambda state, upload, metrics: (state, 1, metrics)}, "the second value has type int"),
    "no message": ({"sent": lambda message: message.shared}, "server.broadcast must return a Message, got a dict"),
    "messages that are numbers": (
        {"sent": lambda message: message._replace(per_client=(1.0,))},
        "server.broadcast: Message.per_client[0] must be an array, got 1.0",
    ),
    "messages for fewer clients": (
        {"sent": lambda message: message._replace(per_client={"own": jnp.zeros((6, 2))})},
        "server.broadcast: Message.per_client['own'] is float32[6, 2], but must have a leading axis of 7 clients",
    ),
    "a metric for each class": (
        {"metrics": {"loss": jnp.zeros(2)}},
        "client.update: metric 'loss' must be a scalar, got float32[2]",
    ),
    "metrics without names": ({"metrics": 1.0}, "client.update: metrics must be a dict of scalars, got 1.0"),
    "a weight that is a number": ({"weight": 1.0}, "client.update: Upload.weight must be an array, got 1.0"),
    "weights of another length": (
        {"weight": jnp.ones(7)},
        "Upload.weight has shape [7], which must be a prefix of the shape of Upload.total, [3]",
    ),
    "weights for other parts": (
        {"weight": {"body": jnp.ones(())}},
        "client.update must return an Upload whose weight is a tree prefix of its total",
    ),
    "an upload of another structure": (INNER, "Upload.total differs in structure from Message.shared"),
    "uploads of another structure, side by side": (
        INNER | {"reduction": Reduction.STACK, "served": lambda mu, stacked: jax.tree.map(jnp.add, mu, stacked.total)},
        "Upload.total differs in structure from Message.shared",
    ),
    "an upload of other shapes": (
        {"total": scalars, "averaging": True},
        "Upload.total['head']['bias'] is float32[], but Message.shared['head']['bias'] is float32[3]",
    ),
    "gradients of every step that there could be": (
        {"gradients": Gradients(update=lambda limit, message: 2 * limit, idle=lambda limit: 1)},
        "Gradients counted 4294967294 gradients in a round: count jnp.minimum(work.steps, limit), because",
    ),
    "an idle client's gradients": (
        {"gradients": Gradients(update=lambda limit, message: 1, idle=lambda limit: limit)},
        "Gradients counted 2147483647 gradients in a round",
    ),
    "a server's state": (
        {"server": scalars},
        "server.update: state['head']['bias'] is float32[], but server.init's state['head']['bias'] is float32[3]",
    ),
    "a server's values": ({"served": lambda mu, reduced: mu}, "server.update must return (state, metrics), got a dict"),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_what_breaks_the_protocol_is_refused_by_its_name(wrong, said, federation):
    with pytest.raises(JaxpflError, match=re.escape(said)) as refusal:
        trace(toy(**wrong), federation)
    assert "\n" not in str(refusal.value)


SCORED_WRONG = {
    "a model that adaptation shrinks": (
        {"personalize": lambda ctx, mu: scalars(mu) if ctx.step_limit else mu},
        "client.personalize: model['head']['bias'] is float32[], but without a step: model['head']['bias'] is",
    ),
    "logits of one example": (
        {"predict": lambda hp, mu, x: x[0, :3]},
        "client.predict must have a row for each of 4 examples, got float32[3]",
    ),
}


@pytest.mark.parametrize(("wrong", "said"), SCORED_WRONG.values(), ids=SCORED_WRONG)
def test_what_is_scored_has_the_shape_that_it_should(wrong, said, federation):
    with pytest.raises(JaxpflError, match=re.escape(said)):
        trace(toy(**wrong), federation, "scores")


def test_a_metric_that_averages_for_itself_is_refused(federation):
    simulation = simulate(toy(), federation, model="linear", plan=ExecutionPlan(devices=1))
    task = simulation._programs._of.task._replace(metrics={"mean": lambda logits, y: logits.mean()})
    simulation._programs._of = simulation._programs._of._replace(task=task)
    said = r"the task's metric 'mean' must be one number for each of 4 examples, got float32\[\]"
    with pytest.raises(JaxpflError, match=said):
        traced(simulation, "scores")


def test_an_error_of_the_servers_own_is_left_as_it_is(federation):
    def fails(mu, reduced):
        raise ValueError("of its own")

    with pytest.raises(ValueError, match=r"^of its own"):
        trace(toy(served=fails), federation)


def test_the_checks_leave_nothing_in_the_program(federation, monkeypatch):
    checked = trace(toy(), federation).jaxpr
    for name in ("check_same", "_check_upload"):
        monkeypatch.setattr(protocol, name, lambda *given, **options: None)
    monkeypatch.setattr(protocol, "_returned", lambda what, result, *names: result)
    assert str(trace(toy(), federation).jaxpr) == str(checked)
