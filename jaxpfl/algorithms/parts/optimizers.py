r"""Client and server optimizers by name, and optimizer states that clients keep between rounds.

The available optimizers are optax's optimizers and the four optimizers below. For example, ``adam`` is ``optax.adam``
with its default arguments, and ``adam:b1=0.8,nesterov=true`` sets two of the arguments. The learning rate is not an
argument, but a hyper-parameter: ``lr`` for the client, ``server_lr`` for the server optimizer. In the following
equations, x are the parameters, :math:`\eta` is the learning rate, and :math:`\Delta` is the negative gradient (at a
server, the mean model update). The other Greek letters are arguments of the optimizers.

The optimizer ``fedavgm`` (Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", https://arxiv.org/abs/1909.06335), also called ``momentum``:

.. math:: v \leftarrow \beta v + \Delta, \qquad x \leftarrow x + \eta v

``fedadagrad``, ``fedadam``, ``fedyogi`` (Reddi et al. 2021, "Adaptive Federated Optimization",
https://arxiv.org/abs/2003.00295, Algorithm 2), starting from :math:`m = 0` and :math:`v = \tau^2`, without bias
correction:

.. math::
   m &\leftarrow \beta_1 m + (1 - \beta_1) \Delta \\
   v &\leftarrow v + \Delta^2 \quad\text{(FedAdagrad)} \\
   v &\leftarrow \beta_2 v + (1 - \beta_2) \Delta^2 \quad\text{(FedAdam)} \\
   v &\leftarrow v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2) \quad\text{(FedYogi)} \\
   x &\leftarrow x + \eta m / (\sqrt v + \tau)

In contrast, optax's ``adam`` and ``yogi`` correct the bias.

A client that keeps its optimizer states begins a round with the momentum or the moments from the end of its previous
round in the cohort. That round may be long ago, and the new round starts from a different model. When a client trains
outside the cohort (`Client.idle`) or personalizes its model, it begins with new optimizer states, and does not change
the kept states. The kept states never leave the client.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxpfl.core import settings, trees
from jaxpfl.core.protocol import Algorithm, Client, ClientContext, Message, Upload, wrapped_client
from jaxpfl.core.types import Array, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.support.errors import JaxpflError, shown, unknown_name

OptimizerFactory: TypeAlias = Callable[[Scalar], optax.GradientTransformation]
"""Function that makes an optimizer from a (traced) learning rate, such as ``optax.adam``."""

Optimizer: TypeAlias = str | OptimizerFactory
"""Name with arguments, or a factory function written by the user."""

_LEFT_OUT = ("lbfgs", "noisy_sgd", "optimistic_adam")
"""Optimizers of optax that are not supported. lbfgs needs the loss for its line search. noisy_sgd would add the same
noise at all clients. optax deprecates optimistic_adam."""

_FRACTIONS = ("b1", "b2", "b3", "decay", "momentum", "rho")
"""Arguments of optimizers that must be below one."""


def fedavgm(learning_rate: Scalar, momentum: float = 0.9, nesterov: bool = False) -> optax.GradientTransformation:
    """FedAvgM: SGD with momentum."""
    return optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)


def fedadagrad(learning_rate: Scalar, b1: float = 0.0, tau: float = 1e-3) -> optax.GradientTransformation:
    """FedAdagrad: Adagrad with momentum ``b1``."""
    return _adaptive(learning_rate, b1, tau, lambda v, square: v + square)


def fedadam(
    learning_rate: Scalar, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3
) -> optax.GradientTransformation:
    """FedAdam: Adam without bias correction."""
    return _adaptive(learning_rate, b1, tau, lambda v, square: b2 * v + (1 - b2) * square)


def fedyogi(
    learning_rate: Scalar, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3
) -> optax.GradientTransformation:
    """FedYogi: Yogi without bias correction."""
    return _adaptive(learning_rate, b1, tau, lambda v, square: v - (1 - b2) * square * jnp.sign(v - square))


class _Moments(NamedTuple):
    """First and second moments of the gradients, each a tree with the structure of the parameters."""

    m: PyTree
    v: PyTree


def _adaptive(
    learning_rate: Scalar, b1: float, tau: float, second: Callable[[jax.Array, jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Make FedAdagrad, FedAdam or FedYogi, which differ only in ``second``, the map from (v, squared gradient) to the
    new v.
    """

    def init(params: PyTree) -> _Moments:
        return _Moments(optax.tree.zeros_like(params), optax.tree.full_like(params, tau**2))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, _Moments]:
        del params
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, updates)
        v = jax.tree.map(lambda v, g: second(v, g**2), state.v, updates)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + tau), m, v), _Moments(m, v)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))


def _optax_optimizers() -> dict[str, Callable[..., Any]]:
    """Collect the optimizers of optax whose first argument is the learning rate."""
    found = {}
    for name, member in vars(optax).items():
        if name.startswith(("_", "scale_by")) or name in _LEFT_OUT or not callable(member) or inspect.isclass(member):
            continue
        try:
            parameters = list(inspect.signature(member).parameters)
        except ValueError:  # a builtin without a signature
            continue
        if parameters[:1] == ["learning_rate"]:
            found[name] = member
    return found


OPTIMIZERS: Mapping[str, Callable[..., Any]] = _optax_optimizers() | {
    "momentum": fedavgm,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
}
"""Factory functions by name, ``(learning rate, **arguments) -> optax.GradientTransformation``."""

_PROPORTIONAL = ("sgd", "momentum", "fedavgm", "optimistic_gradient_descent")


def resolve(optimizer: Optimizer) -> OptimizerFactory:
    """Make an optimizer's factory function from a name with arguments; return a factory function unchanged.

    Examples:
      >>> isinstance(resolve("adam:b1=0.8")(0.1), optax.GradientTransformation)  # optax.adam(0.1, b1=0.8)
      True

    Raises:
      JaxpflError: if the optimizer or an argument is unknown, or if an argument's value has the wrong type or is out of
        range.
    """
    if not isinstance(optimizer, str):
        return optimizer
    name, arguments = settings.split_choice("optimizer", optimizer, OPTIMIZERS)
    known = _arguments(OPTIMIZERS[name]) if arguments else {}
    given: dict[str, Any] = {}
    for key, value in arguments.items():
        if key == "learning_rate":
            raise JaxpflError(f"the learning rate is not an argument of {name}: set lr, or server_lr for the server")
        if key not in known:
            raise unknown_name(f"argument of optimizer {name}", key, known)
        given[key] = _value(f"{name}:{key}", value, isinstance(known[key], bool), below_one=key in _FRACTIONS)
    return functools.partial(OPTIMIZERS[name], **given)


def normalizes(optimizer: Optimizer) -> bool:
    """True if an optimizer's steps are about as large as the learning rate, however large the gradients are.

    The result is false for a factory function, because its optimizer is unknown.
    """
    return isinstance(optimizer, str) and optimizer.partition(":")[0] not in _PROPORTIONAL


def _arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return an optimizer's numeric and Boolean arguments with their defaults.

    Other arguments, such as masks and dtypes, cannot be given as text.
    """
    parameters = list(inspect.signature(factory, eval_str=True).parameters.values())[1:]
    return {
        p.name: p.default
        for p in parameters
        if isinstance(p.default, bool | int | float) or float in typing.get_args(p.annotation)
    }


def _value(what: str, text: str, switch: bool, *, below_one: bool) -> bool | int | float:
    value = settings.literal(text)
    if switch:
        if not isinstance(value, bool):
            raise JaxpflError(f"{what} must be true or false, got {shown(text)}")
        return value
    if type(value) in (int, float) and 0 <= value < (1 if below_one else math.inf):
        return value
    raise JaxpflError(f"{what} must be a number >= 0 and {'< 1' if below_one else 'finite'}, got {shown(text)}")


one_vector = jax.make_user_context(False)
"""Context in which plain SGD is traced for small runs on a GPU, which wait for launches of kernels. `Descent` then
stores a model's parameters as one vector. A step updates them by one operation instead of one for each leaf."""


class PlainSgd(optax.GradientTransformationExtraArgs):
    """SGD without momentum or clipping: each parameter changes independently."""


class Descent(NamedTuple):
    """State of gradient descent.

    Attributes:
      stored: the parameters, as a tree or as one vector (`one_vector`).
      memory: the optimizer state, which is empty for plain SGD.
    """

    stored: PyTree
    memory: PyTree

    @classmethod
    def start(cls, optimizer: optax.GradientTransformation, params: PyTree) -> Descent:
        """Return the state before the first step: ``params`` and a new optimizer state."""
        stored: PyTree = trees.pack(params) if one_vector.value and isinstance(optimizer, PlainSgd) else params
        return cls(stored, optimizer.init(stored))

    @property
    def params(self) -> PyTree:
        """The parameters, as a tree."""
        return trees.unpack(self.stored)

    def replace_params(self, params: PyTree) -> Descent:
        """Return the same state with other parameters."""
        return self._replace(stored=self.stored_form(params))

    def stored_form(self, tree: PyTree) -> PyTree:
        """Return a tree with the structure of the parameters, such as a gradient, in the form of ``stored``."""
        if not isinstance(self.stored, trees.Packed) or isinstance(tree, trees.Packed):
            return tree
        return trees.pack(optax.tree.cast_like(tree, self.params))  # noise widens the types of a gradient

    def step(self, optimizer: optax.GradientTransformation, gradient: PyTree) -> Descent:
        """Return the state after one step.

        For plain SGD made by `LocalWork.descent`, the new parameters are ``params - rate (gradient + weight_decay
        params)``.
        """
        updates, memory = optimizer.update(self.stored_form(gradient), self.memory, self.stored)
        return Descent(optax.apply_updates(self.stored, updates), memory)


class Kept(NamedTuple):
    """State of a client that keeps its optimizer states.

    Attributes:
      own: the state of the method's client.
      memories: optimizer states at the end of the client's last round, in the order of the `Descent` states in the
        round's local steps; not used before the client's first round.
      rounds: number of the client's rounds in the cohort so far, [] int32.
    """

    own: PyTree
    memories: tuple[PyTree, ...]
    rounds: Array


class _Round:
    """Optimizer states of the round that is being traced, before and after its local steps.

    ``kept`` contains the states from before the round; None if the round starts with new states.
    """

    def __init__(self, kept: Kept | None):
        self.kept, self.started, self.ends = kept, 0, []


_round: ContextVar[_Round | None] = ContextVar("descents of a round", default=None)


@contextmanager
def _recorded(kept: Kept | None) -> Iterator[_Round]:
    token = _round.set(found := _Round(kept))
    try:
        yield found
    finally:
        _round.reset(token)


def _is_descent(node: object) -> bool:
    return isinstance(node, Descent)


def resume_memories(carry: PyTree) -> PyTree:
    """Replace the new optimizer states in ``carry``, before the local steps, by the client's kept states, if any."""
    now = _round.get()
    if now is None or now.kept is None:
        return carry
    kept = now.kept

    def resume(node: object) -> object:
        if not isinstance(node, Descent):
            return node
        now.started += 1
        return node._replace(memory=trees.where(kept.rounds > 0, kept.memories[now.started - 1], node.memory))

    return jax.tree.map(resume, carry, is_leaf=_is_descent)


def record_memories(carry: PyTree) -> PyTree:
    """Record the optimizer states in ``carry``, after the local steps; return ``carry`` unchanged."""
    if (now := _round.get()) is not None:
        now.ends += [node.memory for node in jax.tree.leaves(carry, is_leaf=_is_descent) if isinstance(node, Descent)]
    return carry


def keeping(algorithm: Algorithm, splits: Splits) -> Algorithm:
    """Wrap an algorithm so that its clients keep their optimizer states.

    A pooled algorithm is returned unchanged, because its client already keeps the optimizer state.

    Args:
      algorithm: any algorithm that calls `local_work.run_steps` for its local steps, outside of traced branches and
        loops.
      splits: examples of one client, as arrays or shapes, from which the shapes of the states are derived.
    """
    if algorithm.pooled:
        return algorithm
    return algorithm._replace(clients=tuple(_client(client, splits) for client in algorithm.clients))


def _client(inner: Client, splits: Splits) -> Client:
    def init(key: Key, hp: PyTree, ctx: ClientContext, message: Message) -> Kept:
        own = inner.init(key, hp, ctx, message)

        def ends(splits: Splits) -> tuple[PyTree, ...]:
            with _recorded(None) as found:
                inner.update(key, hp, ctx, message, own, splits)
            return tuple(found.ends)

        shapes = jax.eval_shape(ends, splits)
        return Kept(own, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), jnp.int32(0))

    def update(
        key: Key, hp: PyTree, ctx: ClientContext, message: Message, state: Kept, splits: Splits
    ) -> tuple[Kept, Upload, Metrics]:
        with _recorded(state) as found:
            own, upload, metrics = inner.update(key, hp, ctx, message, state.own, splits)
        return Kept(own, tuple(found.ends), state.rounds + 1), upload, metrics

    return wrapped_client(
        inner, init=init, update=update, state=lambda kept: kept.own, keep=lambda kept, own: kept._replace(own=own)
    )
