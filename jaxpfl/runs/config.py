"""A run as text: the dataclass behind the command line, config files and ``config.json``, and reading these files.

A file is TOML, YAML, or the ``config.json`` of a run folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from jaxpfl import algorithms
from jaxpfl.algorithms.parts import schedules
from jaxpfl.algorithms.parts.hyper import PAPER
from jaxpfl.core import choices
from jaxpfl.core.participation import Availability
from jaxpfl.core.settings import (
    COUNT,
    WHOLE,
    Kind,
    Range,
    about,
    check,
    is_default,
    part_of,
    read_help,
    restated,
    setting,
    text_words,
)
from jaxpfl.data import Split
from jaxpfl.data.partition.registry import CLASSLESS
from jaxpfl.data.sources import planted
from jaxpfl.data.sources.base import one_line
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.spec import RunSpec, Settings
from jaxpfl.models import metrics
from jaxpfl.models.base import CLASSIFICATION, TASKS
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs import data_sets
from jaxpfl.runs.data_sets import is_table, preset
from jaxpfl.runs.names_elsewhere import unknown_setting
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, shown, unknown_name
from jaxpfl.uploads import compression

T = TypeVar("T")

_BY_DATA_SET = "by data set unless given"
TEST_USERS = "test"
"""Unseen clients that are the users of the official test set."""


@read_help
@dataclass(frozen=True)
class _Source:
    data: str = setting("digits")
    """Data set: digits (embedded), planted (drawn), mnist, mnist-writers, cifar10, femnist, ..., or idx:, leaf:,
    libsvm:, npz:, csv:, text: or tfds: and a folder, file (relative to --data-dir, or absolute) or name; jaxpfl data
    list shows them. federation: and a folder is what jaxpfl data convert saved there."""
    data_dir: str | None = setting(None)
    """Folder of the data sets; $JAXPFL_DATA_DIR unless given, then ./data."""
    target: str | None = setting(None)
    """Column of the labels, of a table csv:FILE; several with commas between them."""
    client: str | None = setting(None)
    """Column that names the clients, of a table csv:FILE; without it a partition makes them."""
    missing: str = setting("refuse")
    """Rows of a table csv:FILE that lack a value: refuse, or drop them with a warning."""
    ignore: str | None = setting(None)
    """Columns of a table csv:FILE that are not features, separated by commas."""
    missing_words: str | None = setting(None, unless_given="NA, N/A, NaN, null and none unless given")
    """Words of a table csv:FILE for missing values, separated by commas."""
    encoding: str | None = setting(None, unless_given="UTF-8 unless given")
    """Encoding of a table csv:FILE, such as latin-1."""
    window: int | None = setting(None, unless_given="64 unless given", range=COUNT, unit="bytes")
    """Length of the windows of texts text:FOLDER."""
    tokens: bool = setting(False)
    """Integer inputs [N, T] of npz:FILE or leaf:FOLDER are tokens, not numbers."""


@read_help
@dataclass(frozen=True, kw_only=True)
class DataConfig(Split, _Source):
    """The data set, and how it is split among clients. Fields left at None take the data set's preset."""

    partition: Any = restated(Split, "partition", None, _BY_DATA_SET)
    clients: int | None = setting(None, unless_given=_BY_DATA_SET, range=COUNT, unit="clients")
    """Number of clients m."""
    classes_per_client: int | None = restated(Split, "classes_per_client", None, _BY_DATA_SET)
    test_share: Any = restated(Split, "test_share", None, "0.5 for most data sets")
    task: Any = restated(Settings, "task", None, "by the data set's labels unless given")
    unseen_clients: int | str = setting(
        0,
        kind=Kind(
            f"at least 0, or {TEST_USERS}", lambda value: value == TEST_USERS or (WHOLE.holds(value) and value >= 0)
        ),
    )
    """Clients beyond --clients that are never trained: they arrive at the end, adapt and are scored. test takes the
    users of the official test set that have no training examples (LEAF's split by user); the others are trained on
    all their own."""

    @property
    def clients_apart(self) -> int:
        """Number of clients that are drawn among all to be unseen."""
        return self.unseen_clients if isinstance(self.unseen_clients, int) else 0


@read_help
@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, DataConfig):
    """One experiment as text: data, split, work, methods, seeds. Fields left at None take the data set's preset.

    `spec_for` makes a `RunSpec` of it for each method.
    """

    model: Any = restated(Settings, "model", None, _BY_DATA_SET)
    cohort: int | None = restated(Settings, "cohort", None, _BY_DATA_SET)
    local_steps: Any = restated(Settings, "local_steps", None, "10 for most data sets")
    batch_size: Any = restated(Settings, "batch_size", None, _BY_DATA_SET)
    rounds: Any = restated(Settings, "rounds", None, _BY_DATA_SET)
    warm_start: str | None = setting(None)
    """Parameters that every model starts from: a run folder or exported models, for its global model (PATH:METHOD
    where there are several methods), or an .npz file of parameters by path."""
    set: tuple[str, ...] = setting(())
    """A method's own hyper-parameters or options: METHOD.name=value."""
    seed: int = setting(0, range=Range(0, 2**32 - 1))
    """First run seed."""
    seeds: int | None = setting(None, unless_given=_BY_DATA_SET, range=COUNT, unit="runs")
    """Number of run seeds, all in one program."""
    time_to: float | None = setting(None, unless_given="none unless given")
    """Score to reach (mean over clients, of personalised models): results give the simulated time (time_model) until
    the first evaluation that reaches it."""
    eval_every: int = setting(10, range=COUNT)
    """Score all clients after every so many rounds, and at the end."""
    checkpoint_every: int = setting(50, range=COUNT)
    """Write a checkpoint after every so many rounds, and at the end."""
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig, metadata=about())
    """User-level differential privacy of uploads: clipping, noise, and the guarantee."""
    plan: ExecutionPlan = field(default_factory=ExecutionPlan, metadata=about())
    """How to execute: changes speed and memory, not results (up to the rounding of additions)."""


ORDERS = 2
"""Version of the orders in which clients draw their examples, as stored runs record it; they did not before it."""
_MAY_GROW = ("rounds",)
# These do not change the run: its execution, checkpoints, and the paths of its data and initial parameters (whose
# values the fingerprint holds).
_FREE = ("plan", "checkpoint_every", "data_dir", "warm_start")


def resolve(config: RunConfig) -> RunConfig:
    """The same experiment with every preset filled in; `prepare` fills in values that depend on the data.

    Raises:
      JaxpflError: for an unknown task, counts below one, shares outside [0, 1), and a cohort larger than the number of
        clients.
    """
    if isinstance(config.task, str) and config.task not in TASKS:
        raise unknown_name("task", config.task, TASKS)
    _check_text(config)
    metrics.parse_metrics(config.metrics)
    if data_sets.is_stored(config.data):
        config = data_sets.adopt_split(config)
    classless = isinstance(config.task, str) and config.task != CLASSIFICATION
    partition = config.partition
    by_classes = classless and preset(data_sets.origin(config), None)["partition"] not in CLASSLESS
    if partition is None and config.client is None and (is_table(config) or by_classes):
        partition = "iid"
    values = preset(data_sets.origin(config), partition, config.users_per_client)
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    # A cohort preset belongs to the preset's number of clients; a smaller federation takes part whole.
    clients = given["clients"] if given["clients"] is not None else values["clients"]
    if clients is None:  # as many as there are users, which `prepare` counts
        del values["cohort"]
    else:
        values["cohort"] = min(values["cohort"], max(clients, 1))
    config = dataclasses.replace(config, **{k: v for k, v in values.items() if given[k] is None})
    check(config)
    if config.clients is not None:
        config = dataclasses.replace(config, data=planted.enlarged(config.data, config.clients + config.clients_apart))
    if config.unseen_clients == TEST_USERS and (config.partition != "natural" or config.pool_test):
        beside = "pool_test" if config.pool_test else f"partition = {config.partition}"
        raise JaxpflError(f"unseen_clients = {TEST_USERS} needs partition = natural and no pool_test, got {beside}")
    if config.seed > 2**32 - (config.seeds or 1):
        raise JaxpflError(f"seed must be at least 0, and every seed below 2**32, got {config.seed}")
    part_of(Availability, config).checked()
    if config.time_to is not None and config.time_model is None:
        raise JaxpflError(f"time_to = {config.time_to:g} needs time_model, which simulates the seconds of a round")
    config.privacy.check()
    if config.compress is not None:
        compression.resolve(config.compress)
    return config


def preset_words(given: RunConfig, config: RunConfig, swept: Collection[str] = ()) -> str:
    """Settings of a run that its preset changes from the defaults of `fit`; "" for none.

    Args:
      given: the config with its presets left at None.
      config: the same config, resolved.
      swept: settings that a sweep varies, which are left out.
    """
    usual = {field.name: field.default for field in dataclasses.fields(Settings)}
    names = ("model", "cohort", "local_steps", "batch_size", "rounds", "lr")
    own = {name: getattr(config, name) for name in names if getattr(given, name) is None and name not in swept}
    own = {name: value for name, value in own.items() if value not in (None, usual[name])}
    if not own:
        return ""
    here = ", ".join(f"{name}={value!r}" for name, value in own.items())
    there = ", ".join(f"{name}={usual[name]!r}" for name in own)
    return f"preset of {data_sets.origin(config)}: {here} (defaults of fit in Python: {there})"


def _check_text(config: RunConfig) -> None:
    """Refuse Python functions and other values that have no form as text, as only text can be stored."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if one.metadata.get("text") is not None and value is not None and not isinstance(value, str | int | float):
            raise JaxpflError(f"{one.name} of a stored run must be text, got {shown(value)}: use jaxpfl.fit")


def spec_for(config: RunConfig, name: str, methods: tuple[str, ...], *, num_classes: int | None = None) -> RunSpec:
    """The run of one method in a resolved config; the texts of ``--set`` are parsed here.

    Args:
      config: the config.
      name: the method's name.
      methods: all methods of the run.
      num_classes: number of classes of the data set.

    Raises:
      JaxpflError: for a name or a value that is not the method's.
    """
    method = algorithms.get(name)
    hyper: dict[str, float | str] = {}
    options: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(method.hyper)]
    for key, text in method_settings(config, name, methods).items():
        if key in method.options:
            options[key] = choices.typed(f"{name}.{key}", text, type(method.options[key]))
        elif key not in names:
            raise unknown_name(f"hyper-parameter of {name}", key, [*names, *method.options])
        else:
            hyper[key] = text if text == PAPER else choices.typed(f"{name}.{key}", text, float)
    return RunSpec(
        **vars(part_of(Settings, config)),
        method=method,
        hyper=hyper,
        options=options,
        seeds=range(config.seed, config.seed + (config.seeds or 1)),  # any number of them, none listed
        privacy=config.privacy if config.privacy.on else None,
        plan=config.plan,
        num_classes=num_classes,
    )


def method_settings(config: RunConfig, method: str, methods: tuple[str, ...] | None) -> dict[str, str]:
    """The ``--set`` entries of one method, name -> value as text.

    An entry without a method's name is for the only method of the run.

    Args:
      config: settings with these entries.
      method: name of the method.
      methods: all methods of the run; None to take an entry without a name for this one, and leave out all others.

    Raises:
      JaxpflError: for an entry that is not ``METHOD.name=value``, or names a method that is not part of the run.
    """
    settings = {}
    for entry in config.set:
        target, equals, value = entry.partition("=")
        owner, dot, name = target.partition(".")
        if not dot and (methods is None or len(methods) == 1):
            owner, name = method, target
        if not equals or not name or not value:
            raise JaxpflError(f"--set takes METHOD.name=value, got {shown(entry)}")
        if methods is not None and owner not in methods:
            raise unknown_name("method in --set", owner, methods)
        if owner == method:
            settings[name] = value
    return settings


def to_json(config: RunConfig) -> dict[str, Any]:
    """The config as JSON-able values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def fill_defaults(stored: Mapping[str, Any], where: object = "config") -> dict[str, Any]:
    """JSON of a stored config, with the defaults of settings that are newer than it.

    Raises:
      JaxpflError: for a config that was damaged or edited to impossible values.
    """
    return to_json(from_mapping(stored, str(where)))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Changes of a resumed run: (semantic differences, allowed ones), each ``name: old -> new``.

    The plan (but for its precision), more rounds, and the folder of the data may change; anything else is another
    experiment.
    """
    semantic, allowed = [], []
    old = fill_defaults(old)
    new = fill_defaults(new)
    schedule, noise = str(new["lr_schedule"]), new["privacy"]["noise"]
    was, now = (config["plan"]["precision"] for config in (old, new))
    if was != now:  # the only setting of a plan that changes results
        semantic.append(f"plan.precision: {was} -> {now}")
    for name in sorted(new):
        was, now = old[name], new[name]
        if was == now:
            continue
        grown = name in _MAY_GROW and isinstance(was, int) and isinstance(now, int) and now > was
        stretched = grown and schedules.depends_on_rounds(schedule)
        planned = grown and noise == "banded"
        free = name in _FREE or (grown and not stretched and not planned)
        text = f"{name}: {was} -> {now}"
        if stretched:
            text += f" (lr_schedule = {schedule} depends on the number of rounds)"
        if planned:
            text += " (privacy.noise = banded depends on the number of rounds)"
        (allowed if free else semantic).append(text)
    return semantic, allowed


def default_folder(command: str, config: RunConfig, methods: tuple[str, ...], resume: bool) -> Path:
    """``runs/COMMAND-DATA-HASH``, a hash of all that may not change on resume; numbered if the name is taken."""
    fixed = to_json(config)
    for name in ("rounds", "checkpoint_every", "data_dir"):
        del fixed[name]
    precision = fixed.pop("plan")["precision"]
    if precision != "float32":
        fixed["precision"] = precision
    for part, table in ((config, fixed), (config.privacy, fixed["privacy"])):
        for name in set(table) & vars(part).keys():  # a later setting does not rename the folders of runs without it
            if is_default(part, name):
                del table[name]
    text = json.dumps([command, sorted(methods), fixed], sort_keys=True)
    data = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.data)
    first = Path("runs") / f"{command}-{data}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    latest, number = None, 1
    while (folder := first if number == 1 else first.with_name(f"{first.name}-{number}")).exists():
        latest, number = folder, number + 1
    return latest if resume and latest is not None else folder


_MEMORY = 50  # memory of a text while it is parsed, in multiples of its length
_MOST_PARTS = 100_000

_OF_A_RUN = ("config", "methods", "hyper", "data", "warm_start", "graph", "noise", "orders", "versions")
"""Entries of ``config.json`` in a run folder; those beside the config identify the run."""


class ConfigFile(NamedTuple):
    """A config file's content.

    Attributes:
      config: the config.
      methods: the methods that it names; none if the command line names them.
      hyper: method -> hyper-parameter -> value, as a run folder's ``config.json`` records them beside the config;
        `check_recorded` says whether they are still what the config gives.
      data: checksum of the clients of that run; None in other files.
    """

    config: RunConfig = RunConfig()
    methods: tuple[str, ...] = ()
    hyper: Mapping[str, Mapping[str, float | None]] = MappingProxyType({})
    data: int | None = None


def read(path: str | Path) -> ConfigFile:
    """A config file, or the ``config.json`` of a run folder.

    Raises:
      JaxpflError: as `read_file` and `from_mapping`, and for methods that are not a list of names.
    """
    values = read_file(path)
    hyper: dict[str, Any] = {}
    checksum = None
    if {"config", "methods"} <= values.keys():  # from a run folder, where the config is one of several entries
        for name in values:
            if name not in _OF_A_RUN:
                raise unknown_name(f"entry of {path}", str(name), _OF_A_RUN)
        hyper, checksum = values.get("hyper", {}), values.get("data")
        if not isinstance(hyper, dict) or not all(isinstance(own, dict) for own in hyper.values()):
            raise JaxpflError(f"hyper in {path} must be a table of tables, got {shown(hyper)}")
        if not isinstance(values["config"], dict):
            raise JaxpflError(f"config in {path} must be a table, got {shown(values['config'])}")
        values = values["config"] | {"methods": values["methods"]}
    methods = values.pop("methods", [])
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise JaxpflError(f"methods in {path} must be a list of names, got {shown(methods)}")
    known = checksum if isinstance(checksum, int) else None
    return ConfigFile(from_mapping(values, str(path)), tuple(methods), hyper, known)


def read_file(path: str | Path) -> dict[str, Any]:
    """Parse a TOML or YAML config file, or the ``config.json`` of a run folder: names -> values, methods among them.

    Raises:
      JaxpflError: for a missing file, another suffix, or text that does not parse.
    """
    path = Path(path)
    try:
        text = files.contents(path, _MEMORY).decode()
    except UnicodeDecodeError as error:
        raise JaxpflError(f"cannot read {path}: {error}") from None
    try:
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = _yaml(text) or {}
        elif path.suffix == ".json":
            values = files.parse_json(text)
        else:
            raise JaxpflError(f"config {path} must end in .toml, .yaml, .yml or .json")
    except JaxpflError:
        raise
    except Exception as error:
        raise JaxpflError(f"config {path} does not parse: {one_line(error)}") from None
    _check_parts(values, path)
    if not isinstance(values, dict):
        raise JaxpflError(f"config {path} must be a table of names and values")
    return values


def _yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
      Exception: for text that does not parse, and for two values of one name in a mapping (PyYAML keeps the last).
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)  # before a merge (<<) adds what may be overridden
            names = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for (_, name), times in names.items():
                if times > 1:
                    raise ValueError(f"{shown(name)} appears twice in one mapping")
            return node

    return yaml.load(text, Loader)


def _check_parts(value: Any, path: Path) -> None:
    """Refuse YAML with aliases nested so deeply that no message could print it."""
    rest, parts = [value], 0
    while rest:
        part = rest.pop()
        parts += 1
        if parts > _MOST_PARTS:
            raise JaxpflError(f"config {path} holds more than {_MOST_PARTS} values, or one that contains itself")
        rest += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def from_mapping(values: Mapping[str, Any], where: str) -> RunConfig:
    """A config from a mapping of field names (dashes or underscores), such as a parsed file.

    Raises:
      JaxpflError: for an unknown field or a value of the wrong type.
    """
    return _read_fields(RunConfig, values, where)


_TABLES: Mapping[str, type] = {"plan": ExecutionPlan, "privacy": PrivacyConfig}


def _read_fields(kind: type[T], values: Any, where: str, table: str = "") -> T:
    """A settings dataclass from the values in a file or in one of its tables."""
    if not isinstance(values, Mapping):
        raise JaxpflError(f"{table} in {where} must be a table, got {shown(values)}")
    fields = {f.name: text_words(f) for f in dataclasses.fields(cast(Any, kind))}
    changes: dict[str, Any] = {}
    for raw, value in values.items():
        name, full = str(raw).replace("-", "_"), f"{table}.{raw}" if table else str(raw)
        if name not in fields:
            raise unknown_setting(f"field {f'of {table} ' * bool(table)}in {where}", str(raw), fields)
        if name in changes:
            raise JaxpflError(f"{full} in {where} appears twice, with a dash and with an underscore")
        if name in _TABLES:
            changes[name] = _read_fields(_TABLES[name], value, where, name)
        elif name == "set":
            changes[name] = _settings(value, where)
        else:
            changes[name] = _typed(value, fields[name], f"{full} in {where}")
    return kind(**changes)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings under their full names: values of nested mappings, under names joined by dots behind a prefix.

    Examples:
      >>> flat({"plan": {"devices": 2}, "lr": 0.1})
      {'plan.devices': 2, 'lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _settings(value: Any, where: str) -> tuple[str, ...]:
    """``set`` as a list of METHOD.name=value, or as a table (of tables)."""
    if isinstance(value, dict):
        texts = {
            name: ",".join(map(str, one)) if isinstance(one, list) else str(one) for name, one in flat(value).items()
        }
        return tuple(f"{name}={text}" for name, text in texts.items())
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise JaxpflError(f"set in {where} must be a list of METHOD.name=value or a table, got {shown(value)}")


def _typed(value: Any, annotation: str, what: str) -> Any:
    allowed = annotation.split(" | ")
    if value is None and "None" in allowed:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and "float" in allowed:
        try:
            return float(value)
        except OverflowError:
            raise JaxpflError(f"{what} must be {annotation}, got a whole number too large for a float") from None
    if isinstance(value, str) and "float" in allowed:  # YAML reads 1e-3 as text
        with suppress(ValueError):
            return float(value)
    if type(value).__name__ in allowed or (isinstance(value, str) and annotation.startswith("Literal")):
        return value
    raise JaxpflError(f"{what} must be {annotation}, got {shown(value)}")
