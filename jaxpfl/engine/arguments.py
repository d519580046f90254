"""The types of `fit`'s arguments, checked before anything is made of them: each wrong one is one line with its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from jaxpfl.algorithms import Method
from jaxpfl.algorithms.parts.hyper import rates
from jaxpfl.compression import Compressor
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.errors import JaxpflError, warn
from jaxpfl.models import Model
from jaxpfl.privacy import Mechanism
from jaxpfl.similarity.graphs import Graph
from jaxpfl.types import Federation


class _Kind(NamedTuple):
    """What an argument may be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool | np.bool_)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def _is_some(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is one such thing, or a list or array [S] of them."""

    def holds(value: Any) -> bool:
        if isinstance(value, np.ndarray) or hasattr(value, "__jax_array__") or hasattr(value, "aval"):
            value = np.asarray(value)[()]
        several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
        return all(map(of, value)) if several else of(value)

    return holds


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _is_model(value: Any) -> bool:
    return isinstance(value, str | Model | nn.Module)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, str) or callable(value)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


_WHOLE = _Kind("a whole number", _is_whole)
_PROBABILITY = _Kind("a number", _is_number)
_TEXT = _Kind("a name", _is(str))
_RATE = _Kind("a number, or one for each run", _is_some(_is_number))
_OPTIMIZER = _Kind("a name, or a function of the learning rate (optax.adam, not optax.adam(0.1))", _is_optimizer)
_FEDERATION = _Kind("a Federation (jaxpfl.federate and jaxpfl.stack_clients make one)", _is(Federation))
_NAMED = _Kind("a dictionary of values by name", _is_named)

_KINDS: Mapping[str, _Kind] = {
    "method": _Kind("a registered name or a Method", _is(str, Method)),
    "federation": _FEDERATION,
    "model": _Kind("a registered name, a flax.linen module (an instance) or a Model", _is_model),
    **dict.fromkeys(("rounds", "local_steps", "batch_size", "adapt_rounds", "neighbours"), _WHOLE),
    **dict.fromkeys(("num_classes", "cohort", "eval_every", "cohort_cap"), _WHOLE),
    **dict.fromkeys(("dropout", "stragglers"), _PROBABILITY),
    **dict.fromkeys(("participation", "weighting"), _TEXT),
    **dict.fromkeys(("lr", "server_lr"), _RATE),
    **dict.fromkeys(("client_optimizer", "server_optimizer"), _OPTIMIZER),
    **dict.fromkeys(("hyper", "options"), _NAMED),
    "seeds": _Kind("a number of runs, or a list of whole numbers", _is_some(_is_whole)),
    "privacy": _Kind("a jaxpfl.privacy.Mechanism", _is(Mechanism)),
    "compress": _Kind("a name with arguments or a Compressor", _is(str, Compressor)),
    "unseen": _FEDERATION,
    "graph": _Kind("a name or a Graph", _is(str, Graph)),
    "plan": _Kind("an ExecutionPlan", _is(ExecutionPlan)),
}
"""Of every argument of `fit` but ``warm_start``, whose tree is compared with the model's."""

_NEEDED = ("method", "federation", "model", "rounds", "local_steps", "batch_size", "adapt_rounds", "neighbours")
_NEVER_NONE = (*_NEEDED, "dropout", "stragglers", "client_optimizer", "server_optimizer", "seeds")


def check_types(given: Mapping[str, Any]) -> None:
    """Refuses arguments of another type than `fit` takes; their ranges are checked where they are used.

    Raises:
      JaxpflError: names the argument, what it must be and what it is.
    """
    for name, value in given.items():
        if name not in _KINDS or (value is None and name not in _NEVER_NONE):
            continue
        if not _KINDS[name].holds(value):
            raise JaxpflError(f"{name} must be {_KINDS[name].words}, got {_shown(value)}")


def check_unseen(federation: Federation, unseen: Federation) -> None:
    """Refuses unseen clients whose inputs are not like those of the trained ones.

    Raises:
      JaxpflError.
    """
    here, there = federation.input_shape, unseen.input_shape
    if here != there:
        raise JaxpflError(f"unseen clients' inputs must be of shape {here}, as the federation's, got {there}")


def check_rates(method: Method, lr: Any, hyper: Mapping[str, Any]) -> None:
    """Refuses an ``lr`` that nothing takes, and warns of a sweep that moves one rate of several.

    Raises:
      JaxpflError: for a method without a learning rate.
    """
    names = rates(method.hyper)
    if lr is not None and not names:
        raise JaxpflError(f"lr changes nothing: {method.name} has no hyper-parameter that is a learning rate")
    others = [name for name in names if name not in hyper]
    if lr is None and np.ndim(hyper.get("lr", 0)) and others:
        at = ", ".join(f"{name} = {np.asarray(getattr(method.hyper, name)):g}" for name in others)
        warn(f"hyper sweeps lr alone, and {method.name} has other rates, which stay at {at}: fit(lr=) moves them all")


def _shown(value: Any) -> str:
    """A value in a few words."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
