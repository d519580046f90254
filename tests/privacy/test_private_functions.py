"""Functions of a private method get the method's own hyper-parameters, messages and states, not those around them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import Algorithm, Client, ClientContext, Message, Server, Upload
from jaxpfl.core.protocol import Reduced, ServerContext
from jaxpfl.privacy import Mechanism, record
from jaxpfl.privacy.private_sum import _Released, privatize
from jaxpfl.uploads.compression import compressed, resolve
from jaxpfl.uploads.compression.uploads import Held

HYPER = {"lr": 0.25}
CTX = ClientContext(jnp.int32(0), jnp.int32(0), jnp.int32(0), 1, jax.random.key(0))


def recording(seen: dict[str, tuple[Any, ...]]) -> Algorithm:
    """A method that does nothing but note what each of its functions is given."""

    def note(name: str, value: Any, *given: Any) -> Any:
        seen[name] = given
        return value

    client = Client(
        init=lambda key, hp, ctx, message: note("init", "state", hp, message.shared),
        update=lambda key, hp, ctx, message, state, splits: note(
            "update", (jnp.ones(()), Upload(jnp.ones(2), jnp.ones(())), {}), hp, message.shared, state
        ),
        personalize=lambda key, hp, ctx, message, state, splits: note("personalize", None, hp, message.shared, state),
        predict=lambda hp, personal, x: note("predict", None, hp, personal),
        idle=lambda key, hp, ctx, state, splits: note("idle", ("state", {}), hp, state),
        cluster=lambda hp, message, state, splits: note("cluster", None, hp, message.shared, state),
    )
    server = Server(
        init=lambda key, hp, ctx: note("server init", jnp.zeros(2), hp),
        broadcast=lambda key, hp, ctx, state: note("broadcast", Message("shared"), hp, state),
        update=lambda key, hp, ctx, state, sums: note("server update", (state, {}), hp, state),
        predict_global=lambda hp, state, x: note("predict global", None, hp, state),
    )
    return Algorithm((client,), server, 1)


@pytest.mark.parametrize("more", [{}, {"quantile": 0.5, "count_stddev": 3.0}], ids=["fixed", "adaptive"])
def test_every_function_gets_what_is_the_methods(more):
    seen: dict[str, tuple[Any, ...]] = {}
    private, hp = privatize(recording(seen), HYPER, Mechanism(1.0, 0.5, **more))
    (client,), server, key = private.clients, private.server, jax.random.key(0)
    none: Any = None
    guarded = server.init(key, hp, none)
    message = server.broadcast(key, hp, none, guarded)
    server.predict_global(hp, guarded, none)
    client.init(key, hp, none, message)
    client.personalize(key, hp, none, message, "state", none)
    client.predict(hp, "personal", none)
    assert client.cluster is not None
    assert client.idle(key, hp, none, "state", none)[0] == "state"
    client.cluster(hp, message, "state", none)
    _, upload, metrics = client.update(key, hp, none, message, jnp.zeros(()), none)
    want = {
        "server init": (HYPER,),
        "init": (HYPER, "shared"),
        "personalize": (HYPER, "shared", "state"),
        "predict": (HYPER, "personal"),
        "idle": (HYPER, "state"),
        "cluster": (HYPER, "shared", "state"),
    }
    assert {name: seen[name] for name in want} == want
    for name in ("broadcast", "predict global"):
        assert seen[name][0] == HYPER
        assert seen[name][1].tolist() == [0.0, 0.0]
    assert seen["update"][:2] == (HYPER, "shared")
    assert float(jnp.linalg.norm(upload.total.change)) == pytest.approx(0.5)
    assert float(metrics["upload_norm"]) == pytest.approx(2**0.5)
    assert float(metrics["clipped"]) == 1.0
    if more:
        assert float(message.shared.clipping_norm) == 0.5
        assert float(upload.total.below) == -0.5


@pytest.mark.parametrize("wrong", ["state", "upload"])
def test_a_client_whose_work_is_not_finite_adds_nothing_to_sum_or_count(wrong):
    nan = jnp.float32(jnp.nan)
    state, total = (nan, jnp.ones(2)) if wrong == "state" else (jnp.ones(()), jnp.array([1.0, nan]))
    method = recording({})
    inner = method.clients[0]._replace(update=lambda *given: (state, Upload(total, jnp.ones(())), {}))
    mechanism = Mechanism(1.0, 0.5, quantile=0.5, count_stddev=3.0)
    private, hp = privatize(method._replace(clients=(inner,)), HYPER, mechanism)
    message = private.server.broadcast(jax.random.key(0), hp, None, private.server.init(jax.random.key(0), hp, None))
    sends = compressed(private, resolve("lossless"), None, feedback=False)  # pyright: ignore[reportArgumentType]
    for algorithm, held in ((private, None), (sends, Held(None, ()))):
        _, upload, _ = algorithm.clients[0].update(jax.random.key(0), hp, CTX, message, held, None)
        assert upload.total.change.tolist() == [0.0, 0.0]
        assert float(upload.total.below) == 0.0
        assert bool(upload.failed)


@pytest.mark.parametrize(("limit", "below"), [(4.9, -0.5), (5.0, 0.5), (6.0, 0.5)])
def test_a_client_is_counted_by_a_half_on_its_side_of_the_limit(limit, below):
    """As in Andrew et al. 2021: counts of 1/2 and -1/2 are as sensitive as a change of one half."""
    method = recording({})
    total = jnp.array([3.0, 4.0])
    inner = method.clients[0]._replace(update=lambda *given: (jnp.ones(()), Upload(total, jnp.ones(())), {}))
    mechanism = Mechanism(1.0, limit, quantile=0.5, count_stddev=3.0)
    private, hp = privatize(method._replace(clients=(inner,)), HYPER, mechanism)
    message = private.server.broadcast(jax.random.key(0), hp, None, private.server.init(jax.random.key(0), hp, None))
    _, upload, metrics = private.clients[0].update(jax.random.key(0), hp, None, message, None, None)
    assert float(upload.total.below) == below
    assert float(metrics["clipped"]) == (below < 0)
    assert float(jnp.linalg.norm(upload.total.change)) == pytest.approx(min(limit, 5.0))
    assert not bool(upload.failed)


LONG = {"a": jnp.full(50, 3 / 50**0.5), "b": jnp.full(50, -4 / 50**0.5)}
"""A change of norm 5, whose leaves have norms 3 and 4."""


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(2.0, 0.5),
        Mechanism(2.0, 0.5, quantile=0.5, count_stddev=3.0),
        Mechanism(2.0, 0.5, "distributed", min_uploads=3),
    ],
    ids=["central", "adaptive", "distributed"],
)
def test_what_a_round_releases(mechanism):
    """Of changes that are clipped as one vector, whatever their weight; noised as claimed, whatever cohort came; and
    divided by a public number. The adapted C is another than the first."""
    method = recording({})
    sent = Upload(jax.tree.map(lambda a: 8 * a, LONG), jnp.float32(8))
    client = method.clients[0]._replace(update=lambda *given: (jnp.ones(()), sent, {}))
    server = method.server._replace(update=lambda key, hp, ctx, state, sums: (state, {"sums": sums}))
    private, hp = privatize(method._replace(clients=(client,), server=server), HYPER, mechanism)
    key, ctx, adapts = jax.random.key(3), ServerContext(jnp.int32(0), 9, 4.0), mechanism.quantile is not None
    guarded, limit = private.server.init(key, hp, ctx), 1.7 if adapts else 0.5
    guarded = guarded._replace(clipping_norm=jnp.float32(limit)) if adapts else guarded
    message = private.server.broadcast(key, hp, ctx, guarded)
    with record() as draws:
        change = private.clients[0].update(key, hp, None, message, jnp.zeros(()), None)[1].total.change
    size = float(jnp.linalg.norm(jnp.concatenate([change["a"], change["b"]])))
    if mechanism.server_adds:
        assert (size, draws) == (pytest.approx(limit), [])
    else:
        assert [(draw.entries, draw.stddev) for draw in draws] == [(100, pytest.approx(1 / 3**0.5))]
        assert 3 < size < 9  # 5.8, and a clipped change of .5
    update = jax.jit(lambda key, sums: private.server.update(key, hp, ctx, guarded, sums)[1]["sums"])
    z = float(mechanism.noise_multiplier_of_sum)
    stddevs = [z * limit, 3.0][: 1 + adapts] if mechanism.server_adds else []
    keys = []
    for came, own in zip((0, 1, 3, 6), jax.random.split(key, 4), strict=True):
        total = jax.tree.map(lambda a: came * a, LONG)  # noqa: B023
        with record() as draws:
            got = update(own, Reduced(_Released(total, jnp.zeros(())), jnp.float32(came), jnp.int32(came)))
        keys += [draw.key for draw in draws]
        assert sorted(draw.stddev for draw in draws) == pytest.approx(sorted(stddevs))
        due = mechanism.server_adds or came >= 3
        assert (float(got.weight), int(got.contributors)) == (4.0 * due, 4 * due)
        added = {name: np.asarray(got.total[name] - total[name] * due) for name in LONG}
        assert (np.abs(added["a"] - added["b"]) > 1e-3).mean() == (mechanism.server_adds and pytest.approx(1, abs=0.05))
    assert len(set(keys)) == len(keys) == 4 * len(stddevs)


@pytest.mark.parametrize("z", [4.0, 1e-4])
def test_what_a_step_releases(z):
    """Noise, under a key for the parameters and one for psi, is added to what is clipped already."""
    step = Mechanism(z, 0.5, "per_step", scale_clipping_norm=0.2).step_noise
    both = jax.jit(lambda key, h, k: (step.release_gradient(key, h), step.release_scale(key, k)))
    with record() as draws:
        h, k = both(jax.random.key(0), jax.tree.map(lambda a: 1e6 * a, LONG), jnp.float32(-1e6))
    assert [draw.stddev for draw in draws] == pytest.approx([z * 0.5, z * 0.2])
    assert draws[0].key != draws[1].key
    size = np.linalg.norm(np.concatenate([h["a"], h["b"]]))
    if z == 4:
        assert size == pytest.approx(20, rel=0.4)
    else:
        assert (size, float(k)) == (pytest.approx(0.5, rel=1e-2), pytest.approx(-0.2, rel=1e-2))


def test_a_server_that_overflows_keeps_its_state_and_the_noise_that_was_drawn():
    """Noise of later rounds cancels part of that of earlier ones, whether or not the server could use the sum."""
    method = recording({})
    server = method.server._replace(update=lambda *given: (jnp.full(2, jnp.inf), {}))
    banded = Mechanism(1.0, 0.5, "banded", bands=2, coefficients=(0.8, 0.6))
    splits: Any = ()
    private, hp = privatize(method._replace(server=server), HYPER, banded, splits)
    key, ctx = jax.random.key(3), ServerContext(jnp.int32(0), 9, 4.0)
    before = private.server.init(key, hp, ctx)
    sums = Reduced(_Released(jnp.zeros(2), ()), jnp.float32(4), jnp.int32(4))
    after, metrics = private.server.update(key, hp, ctx, before, sums)
    assert float(metrics["overflowed"]) == 1
    np.testing.assert_array_equal(after.state, before.state)
    assert np.all(after.past != before.past)
