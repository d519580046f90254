"""``jaxpfl recommend``: recommend a method for a federation from the nearest cells of the map of best methods."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jaxpfl.cli.training import named_file
from jaxpfl.core.settings import COUNT, Range, check, is_default, setting
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.privacy.accounting import LARGEST_EPSILON
from jaxpfl.runs.config import DataConfig, RunConfig, read, resolve
from jaxpfl.support.errors import JaxpflError, shown


@dataclass(frozen=True)
class _Run:
    """Settings of the planned run."""

    cohort: int | None = setting(
        None, "Clients in a round.", unless_given="depends on the data set", range=COUNT, unit="clients"
    )
    model: str | None = setting(None, "Model: linear, mlp, cnn and others.", unless_given="depends on the data set")
    steps: int | None = setting(
        None,
        "Total number of gradient steps of a client.",
        unless_given="the steps of the most similar federation in the map",
        range=COUNT,
        unit="steps",
    )
    epsilon: float | None = setting(
        None,
        "User-level privacy budget epsilon of the whole run; private federations of the map are then compared.",
        range=Range(0, LARGEST_EPSILON, True),
    )
    delta: float | None = setting(
        None,
        "Delta of the privacy claim.",
        unless_given="at most 1e-3 and a tenth of 1 / clients",
        range=Range(0, 1, True, True),
    )


_RUN = _Run()


def commands(args: list[str]) -> tuple[Callable[..., None], ...]:
    """Return the command; a config file named in the arguments determines the defaults of its flags."""
    path = named_file(args)
    file = RunConfig() if path is None else read(path).config
    data_flags = DataConfig(**{f.name: getattr(file, f.name) for f in fields(DataConfig)})
    budget = {"epsilon": file.privacy.epsilon, "delta": file.privacy.delta}
    run_flags = replace(_RUN, cohort=file.cohort, model=file.model, **budget)

    def recommend(
        settings: Annotated[DataConfig, arg(name="")] = data_flags,
        run: Annotated[_Run, arg(name="")] = run_flags,
        json: bool = False,
        config: Path | None = None,
    ) -> None:
        """Find the measured federations most similar to yours, and print their best method and the command to run.

        Args:
            json: Print one JSON object and nothing else on standard output.
            config: TOML or YAML file with flags.
        """
        _recommend(replace(file, **vars(settings)), run, config, json)

    return (recommend,)


def _check(run: _Run, file: PrivacyConfig, path: Path | None) -> None:
    """Refuse values that no run can have, and privacy settings without a privacy budget.

    Raises:
      JaxpflError: if there is such a value; the message names the flag, or the field of the config file.
    """
    check(run)
    if run.epsilon is not None:
        return
    if run.delta != file.delta:
        raise JaxpflError("--delta requires --epsilon")
    given = [one.name for one in fields(file) if not is_default(file, one.name)]
    if given and file.noise_multiplier is None:
        value = shown(getattr(file, given[0]))
        raise JaxpflError(f"privacy.{given[0]} = {value} in {path} requires privacy.epsilon there, or --epsilon")


def _recommend(settings: RunConfig, run: _Run, path: Path | None, as_json: bool) -> None:
    from jaxpfl import data
    from jaxpfl.core import participation
    from jaxpfl.models import build_model
    from jaxpfl.runs.data_sets import model_for
    from jaxpfl.runs.results import client_clusters
    from jaxpfl.runs.setup import load_federation

    from . import atlas, recommend
    from .nearest import Asked
    from .skew import measures, sizes

    _check(run, settings.privacy, path)
    # Privacy is checked with the delta that follows from the number of clients.
    config = resolve(replace(settings, cohort=run.cohort, model=run.model, privacy=PrivacyConfig()))
    source, federation = load_federation(config)
    if (classes := {"classification": source.num_classes, "binary": 2, "ranking": 2}.get(source.task)) is None:
        raise JaxpflError(
            f"the map of winners covers classifications, and has no cell for {source.task}, the task of {config.data}: "
            "run jaxpfl compare local fedavg-ft ditto with these flags"
        )
    if config.standardize:
        data.check_standardizable(source)
    if config.clients_apart:
        federation, _ = data.set_apart(federation, config.clients_apart, config.split_seed)
    model = config.model or model_for(source)
    build_model(model, source.num_classes, federation.input_shape)  # refuses a model that does not fit the data
    cohort = run.cohort or min(config.cohort or federation.num_clients, federation.num_clients)
    participation.of(federation.num_clients, cohort)  # refuses a cohort that is larger than the number of clients
    member = client_clusters(config, classes)
    asked = Asked(
        measures(federation, classes),
        config.partition if member is None else "clusters",
        cohort / federation.num_clients,
        model,
        run.steps,
        run.epsilon,
        None if member is None else int(member.max()) + 1,
        sizes(federation),
    )
    given = replace(settings, privacy=replace(settings.privacy, delta=run.delta))
    found = recommend.recommend(atlas.read(), asked, cohort, given)
    if as_json:
        print(json.dumps(found.to_json()))
        return
    from jaxpfl.support.console import Console

    from .show import print_recommendation

    print_recommendation(Console(), found)
