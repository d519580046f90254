"""Settings of a run as text: the dataclass `RunConfig`, and the functions that read it from files.

The command line, config files (TOML or YAML) and the ``config.json`` of a run folder all give a `RunConfig`.
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
from jaxpfl.algorithms import Method
from jaxpfl.algorithms.parts import schedules
from jaxpfl.algorithms.parts.hyper import PAPER
from jaxpfl.core import settings
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
from jaxpfl.data.sources.base import data_directory, data_folder, one_line
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.spec import RunSpec, Settings, refuse, without_effect
from jaxpfl.models import metrics
from jaxpfl.models.base import CLASSIFICATION, TASKS
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs import data_sets, run_folder
from jaxpfl.runs.data_sets import is_table, preset
from jaxpfl.runs.names_elsewhere import unknown_setting
from jaxpfl.runs.run_folder import FEDERATION
from jaxpfl.support import files, own_code
from jaxpfl.support.errors import JaxpflError, shown, unknown_name
from jaxpfl.uploads import compression

T = TypeVar("T")

_BY_DATA_SET = "depends on the data set"
TEST_USERS = "test"
"""Value of ``unseen_clients`` that makes the users of the official test set the unseen clients."""


@read_help
@dataclass(frozen=True)
class _Source:
    data: str = setting("digits")
    """Data set: digits (included), planted (simulated), mnist, mnist-writers, cifar10, femnist, ...; or a prefix idx:,
    leaf:, libsvm:, npz:, csv: or text: followed by a folder or file; or tfds: followed by a name; or federation:
    followed by a folder that jaxpfl data convert saved. Relative paths are looked up in --data-dir (if given), then in
    the current folder, then in the folder of the data sets. jaxpfl data list shows all data sets."""
    data_dir: str | None = setting(None)
    """Folder of the data sets; by default, $JAXPFL_DATA_DIR, or ./data if that is not set."""
    target: str | None = setting(None)
    """Column of the labels in a table csv:FILE; several columns are separated by commas."""
    client: str | None = setting(None)
    """Column of the client names in a table csv:FILE; without it, --partition divides the rows among clients."""
    missing: str = setting("refuse")
    """Treatment of missing values in a table csv:FILE: refuse the table; drop the rows with a warning; impute a column
    by its median, or its most frequent string, over all clients' training rows; or impute-client, by the median or the
    most frequent string over the client's own training rows. Each imputed column adds a feature that indicates missing
    values."""
    ignore: str | None = setting(None)
    """Columns of a table csv:FILE to leave out of the features, separated by commas."""
    date: str | None = setting(None)
    """Columns of dates in a table csv:FILE, separated by commas; each becomes a number of days."""
    split_date: str | None = setting(None)
    """Date, such as 2025-01-31, that splits a table csv:FILE by the first column of --date: earlier rows are for
    training, the others for testing. Validation rows are each client's last training rows."""
    person: str | None = setting(None)
    """Column of a table csv:FILE that names each row's person; all rows of a person at one client are in the same
    split, and protected together with privacy.unit = example."""
    missing_words: str | None = setting(None, unless_given="NA, N/A, NaN, null and none")
    """Words that mark a missing value in a table csv:FILE, separated by commas."""
    encoding: str | None = setting(None, unless_given="UTF-8")
    """Encoding of a table csv:FILE, such as latin-1."""
    window: int | None = setting(None, unless_given="64", range=COUNT, unit="bytes")
    """Length of the windows into which the text of text:FOLDER is cut."""
    tokens: bool = setting(False)
    """Treat the integer inputs [N, T] of npz:FILE or leaf:FOLDER as tokens, not as numbers."""


@read_help
@dataclass(frozen=True, kw_only=True)
class DataConfig(Split, _Source):
    """The data set and its split among clients. The data set's preset supplies the values of fields that are None."""

    partition: Any = restated(Split, "partition", None, _BY_DATA_SET)
    clients: int | None = setting(None, unless_given=_BY_DATA_SET, range=COUNT, unit="clients")
    """Number of clients m."""
    classes_per_client: int | None = restated(Split, "classes_per_client", None, _BY_DATA_SET)
    test_share: Any = restated(Split, "test_share", None, "0.5 for most data sets")
    task: Any = restated(Settings, "task", None, "depends on the labels")
    unseen_clients: int | str = setting(
        0,
        kind=Kind(
            f"at least 0, or {TEST_USERS}", lambda value: value == TEST_USERS or (WHOLE.holds(value) and value >= 0)
        ),
    )
    """Number of clients that do not take part in training: after the last round, they adapt and are scored. If the
    number of clients is set (by --clients or the data set's preset), these are additional clients; if the data
    determine the clients, as with --client, these are held out from the data's clients. With test, the unseen clients
    are the users of the official test set that have no training examples (LEAF's split by user), and the other users
    train on all their examples."""

    @property
    def named_task(self) -> str | None:
        """Name of a registered task; None for the default task, and for the user's own task."""
        return self.task if isinstance(self.task, str) and not own_code.is_reference(self.task) else None

    @property
    def clients_apart(self) -> int:
        """Number of clients that are drawn as unseen clients; 0 if the test users are the unseen clients."""
        return self.unseen_clients if isinstance(self.unseen_clients, int) else 0


@read_help
@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings, DataConfig):
    """Settings of one experiment, as a config file stores them.

    As in `DataConfig`, the data set's preset supplies the values of some fields that are None. `spec_for` converts the
    config to a `RunSpec` for each method.
    """

    model: Any = restated(Settings, "model", None, _BY_DATA_SET)
    cohort: int | None = restated(Settings, "cohort", None, _BY_DATA_SET)
    local_steps: Any = restated(Settings, "local_steps", None, "10 for most data sets")
    batch_size: Any = restated(Settings, "batch_size", None, _BY_DATA_SET)
    rounds: Any = restated(Settings, "rounds", None, _BY_DATA_SET)
    warm_start: str | None = setting(None)
    """Initial parameters of every model: a run folder or a folder of exported models, whose global model is used
    (PATH:METHOD if there are several methods), or an .npz file whose keys are parameter paths."""
    set: tuple[str, ...] = setting(())
    """Hyper-parameters or options of a method: METHOD.name=value."""
    seed: int = setting(0, range=Range(0, 2**32 - 1))
    """First seed; further seeds are the next integers."""
    seeds: int | None = setting(None, unless_given=_BY_DATA_SET, range=COUNT, unit="runs")
    """Number of seeds; the runs of all seeds are executed together, as one program."""
    time_to: float | None = setting(None, unless_given="none")
    """Target score of the personalized models, averaged over clients. The results give the simulated time (see
    time_model) until the first evaluation that reaches this score."""
    eval_every: int = setting(10, range=COUNT)
    """Number of rounds between evaluations of all clients; the last round is always evaluated."""
    checkpoint_every: int = setting(50, range=COUNT)
    """Number of rounds between checkpoints; one is always written at the end."""
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig, metadata=about())
    """Differential privacy of users or examples: clipping, noise and the privacy guarantee."""
    plan: ExecutionPlan = field(default_factory=ExecutionPlan, metadata=about())
    """Execution of the run, which affects speed and memory; except for precision, results differ only by rounding."""


ORDERS = 2
"""Version of the order in which clients draw their examples. Run folders record it from version 2 on."""
_MAY_GROW = ("rounds",)
# These settings do not change the results: execution, checkpoints, and the paths to the data and the initial parameters
# (the fingerprint covers the values that are read from these paths).
_FREE = ("plan", "checkpoint_every", "data_dir", "warm_start")


def resolve(config: RunConfig) -> RunConfig:
    """Check the config and fill in the values of the data set's preset.

    `setup.prepare` later fills in the values that depend on the data.

    Raises:
      JaxpflError: if the task is unknown, a value is out of range, settings contradict each other, or a setting cannot
        be stored as text.
    """
    if config.named_task is not None and config.named_task not in TASKS:
        raise unknown_name("task", config.named_task, TASKS)
    for one in dataclasses.fields(config):  # Python functions cannot be written as text, and a config is stored as text
        value = getattr(config, one.name)
        if one.metadata.get("text") is not None and value is not None and not isinstance(value, str | int | float):
            raise JaxpflError(f"a config takes {one.name} only as text or a number, got {shown(value)}: use jaxpfl.fit")
    metrics.parse_metrics(config.metrics)
    folder = data_folder(config.data, config.data_dir)
    if (
        config.data_dir or folder != data_directory()
    ):  # stored as an absolute path, so that the run can be repeated from another folder
        config = dataclasses.replace(config, data_dir=str(folder.absolute()))
    if data_sets.is_stored(config.data):
        config = data_sets.adopt_split(config)
    classless = config.named_task not in (None, CLASSIFICATION)
    partition = config.partition
    by_classes = classless and preset(data_sets.origin(config), None)["partition"] not in CLASSLESS
    if partition is None and config.client is None and (is_table(config) or by_classes):
        partition = "iid"
    values = preset(data_sets.origin(config), partition, config.users_per_client)
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    # The preset's cohort is meant for the preset's number of clients; with fewer clients than that, all take part.
    clients = given["clients"] if given["clients"] is not None else values["clients"]
    if clients is None:  # one client per user (or group of users); `prepare` counts them
        del values["cohort"]
    else:
        values["cohort"] = min(values["cohort"], max(clients, 1))
    config = dataclasses.replace(config, **{k: v for k, v in values.items() if given[k] is None})
    check(config)
    if config.clients is not None:
        config = dataclasses.replace(config, data=planted.enlarged(config.data, config.clients + config.clients_apart))
    if config.unseen_clients == TEST_USERS and (config.partition != "natural" or config.pool_test):
        beside = "pool_test" if config.pool_test else f"partition = {config.partition}"
        raise JaxpflError(f"unseen_clients = {TEST_USERS} requires partition = natural and no pool_test, got {beside}")
    if config.split_date is not None and config.pool_test:
        raise JaxpflError(f"split_date = {config.split_date} makes a test set: leave out pool_test")
    if config.seed > 2**32 - (config.seeds or 1):
        raise JaxpflError(f"seed must be at least 0 and seed + seeds at most 2**32, got seed = {config.seed}")
    part_of(Availability, config).checked()
    if config.time_to is not None and config.time_model is None:
        raise JaxpflError(f"time_to = {config.time_to:g} requires time_model, which simulates the seconds of a round")
    config.privacy.check()
    if config.compress is not None:
        compression.resolve(config.compress)
    return config


def check_given(config: RunConfig, recorded: RunConfig | None = None) -> None:
    """Refuse data settings, or a model, that have no effect because of another setting.

    Args:
      config: config before `resolve`.
      recorded: config in the run or sweep folder from which ``config`` takes its other settings; None if there is no
        such folder. A setting with the recorded value is not refused, because that value may come from a preset.

    Raises:
      JaxpflError: if a setting without effect was given.
    """
    without = without_effect(config)
    if config.split_date is not None:
        without["test_share"] = f"split_date = {config.split_date} chooses the test rows"
    if data_sets.is_stored(config.data):
        names = set(data_sets.FIELDS) - {"data", "data_dir", "task"}
        without |= dict.fromkeys(names, f"jaxpfl data convert has already split {config.data}")
    refuse(config, without, recorded)


def preset_words(given: RunConfig, config: RunConfig, swept: Collection[str] = ()) -> str:
    """Return a line with the settings for which the preset differs from the defaults of `fit`; "" if none differ.

    Args:
      given: config before `resolve`, in which settings that the preset decides are None.
      config: the same config after `resolve`.
      swept: settings that a sweep varies, which are omitted from the line.
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


def spec_for(
    config: RunConfig, name: str | Method, methods: tuple[str, ...], *, num_classes: int | None = None
) -> RunSpec:
    """Return the run specification of one method, with the entries of ``--set`` parsed.

    Args:
      config: resolved config.
      name: name of the method, or the method.
      methods: names of all methods of the run.
      num_classes: number of classes of the data set.

    Raises:
      JaxpflError: if ``--set`` names a hyper-parameter or option that the method does not have, or gives it a value of
        the wrong type.
    """
    method = algorithms.get(name) if isinstance(name, str) else name
    name = method.name
    hyper: dict[str, float | str] = {}
    options: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(method.hyper)]
    for key, text in method_settings(config, name, methods).items():
        if key in method.options:
            options[key] = settings.parse_value(f"{name}.{key}", text, type(method.options[key]))
        elif key not in names:
            raise unknown_name(f"hyper-parameter of {name}", key, [*names, *method.options])
        else:
            hyper[key] = text if text == PAPER else settings.parse_value(f"{name}.{key}", text, float)
    return RunSpec(
        **vars(part_of(Settings, config)),
        method=method,
        hyper=hyper,
        options=options,
        seeds=range(config.seed, config.seed + (config.seeds or 1)),  # a range, because there may be very many seeds
        privacy=config.privacy if config.privacy.on else None,
        plan=config.plan,
        num_classes=num_classes,
    )


def method_settings(config: RunConfig, method: str, methods: tuple[str, ...] | None) -> dict[str, str]:
    """Return the ``--set`` entries of one method as a mapping name -> value (text).

    If the run has only one method, its entries may omit the method's name.

    Args:
      config: config with the ``--set`` entries.
      method: name of the method.
      methods: names of all methods of the run. If None, entries for any method are accepted, and entries without a
        method's name apply to ``method``.

    Raises:
      JaxpflError: if an entry is not ``METHOD.name=value``, or names a method that is not part of the run.
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
    """Return the config as a dict of JSON values; references ``FILE.py:NAME`` to the user's code have no folder."""
    return json.loads(json.dumps(dataclasses.asdict(run_folder.located(config))))


def fill_defaults(stored: Mapping[str, Any], where: object = "config") -> dict[str, Any]:
    """Return a stored config with defaults for the settings that were added to jaxpfl after it was stored.

    Raises:
      JaxpflError: if the config has an unknown setting or a value of the wrong type.
    """
    return to_json(from_mapping(stored, str(where)))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the changes between a stored and a resumed config: (forbidden changes, allowed changes).

    Each change is a string ``name: old -> new``. The execution plan, ``checkpoint_every``, and the paths of the data
    and of the initial parameters may change. The plan's precision and tuning may only change from or to ``auto``. The
    number of rounds may increase, unless the learning-rate schedule or the privacy noise depends on it. Any other
    change makes a different experiment.
    """
    semantic, allowed = [], []
    old = fill_defaults(old)
    new = fill_defaults(new)
    schedule, noise = str(new["lr_schedule"]), new["privacy"]["noise"]
    for name in ("precision", "tuning"):  # the settings of a plan that change results
        was, now = (config["plan"][name] for config in (old, new))
        if was != now and "auto" not in (was, now):
            semantic.append(f"plan.{name}: {was} -> {now}")
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
    """Return the default folder of a run, ``runs/COMMAND-DATA-HASH``.

    The hash covers the command, the methods and the settings, except the number of rounds, ``checkpoint_every``, the
    folder of the data, and the execution plan other than its precision. If the folder exists, a number is appended;
    with ``resume``, the existing folder with the highest number is returned.
    """
    fixed = to_json(config)
    for name in ("rounds", "checkpoint_every", "data_dir"):
        del fixed[name]
    precision = fixed.pop("plan")["precision"]
    if precision != "float32":
        fixed["precision"] = precision
    for part, table in ((config, fixed), (config.privacy, fixed["privacy"])):
        # Defaults are left out of the hash, so that a setting added later does not rename the folders of older runs.
        for name in set(table) & vars(part).keys():
            if is_default(part, name):
                del table[name]
    text = json.dumps([command, sorted(methods), fixed], sort_keys=True)
    data = "".join(c if c.isalnum() or c in "-_" else "-" for c in config.data)
    first = Path("runs") / f"{command}-{data}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    latest, number = None, 1
    while (folder := first if number == 1 else first.with_name(f"{first.name}-{number}")).exists():
        latest, number = folder, number + 1
    return latest if resume and latest is not None else folder


_MEMORY = 50  # memory needed to parse a file, in multiples of its size
_MOST_PARTS = 100_000

_OF_A_RUN = ("config", "methods", "hyper", "data", "warm_start", "graph", "noise", "orders", "versions", "code")
"""Entries of ``config.json`` in a run folder. The entries other than ``config`` identify the run."""


class ConfigFile(NamedTuple):
    """Content of a config file.

    Attributes:
      config: settings in the file.
      methods: names of the methods in the file; if empty, the command line must name the methods.
      hyper: hyper-parameters that a run folder's ``config.json`` records, as method -> hyper-parameter -> value;
        `check_recorded` compares them with the config's values.
      data: checksum of the clients' data that a run folder's ``config.json`` records; None for other files.
      path: path of the file; None if there is no file.
    """

    config: RunConfig = RunConfig()
    methods: tuple[str, ...] = ()
    hyper: Mapping[str, Mapping[str, float | None]] = MappingProxyType({})
    data: int | None = None
    path: Path | None = None

    @property
    def recorded(self) -> RunConfig | None:
        """Config of a run or sweep that jaxpfl wrote into a ``.json`` file; None for a file that the user wrote."""
        return self.config if self.path is not None and self.path.suffix == ".json" else None


def read(path: str | Path) -> ConfigFile:
    """Read a config file, or the ``config.json`` of a run folder.

    Raises:
      JaxpflError: as in `read_file` and `from_mapping`; if ``methods`` is not a list of names; or if a ``config.json``
        has an unknown entry, or its ``config`` or ``hyper`` is not a table.
    """
    values = read_file(path)
    hyper: dict[str, Any] = {}
    checksum = code = None
    if {"config", "methods"} <= values.keys():  # a run folder's config.json, where the config is one entry
        for name in values:
            if name not in _OF_A_RUN:
                raise unknown_name(f"entry of {path}", str(name), _OF_A_RUN)
        hyper, checksum = values.get("hyper", {}), values.get("data")
        if not isinstance(hyper, dict) or not all(isinstance(own, dict) for own in hyper.values()):
            raise JaxpflError(f"hyper in {path} must be a table of tables, got {shown(hyper)}")
        if not isinstance(values["config"], dict):
            raise JaxpflError(f"config in {path} must be a table, got {shown(values['config'])}")
        code = values.get("code")
        values = values["config"] | {"methods": values["methods"]}
    methods = pop_methods(values, path)
    known = checksum if isinstance(checksum, int) else None
    config = from_mapping(values, str(path))
    if checksum is not None and (Path(path).parent / FEDERATION).is_dir():  # the folder may have been moved
        config = dataclasses.replace(config, data_dir=str(Path(path).parent))
    if code is not None:
        folder = Path(path).parent / run_folder.CODE
        methods, config = run_folder.methods_in(folder, methods, code), run_folder.located(config, folder)
    return ConfigFile(config, tuple(methods), hyper, known, Path(path))


def pop_methods(values: dict[str, Any], path: str | Path) -> list[str]:
    """Remove the entry ``methods`` from the values in a file, and return its names; an empty list if it is missing.

    Raises:
      JaxpflError: if the entry is not a list of names.
    """
    methods = values.pop("methods", [])
    if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
        raise JaxpflError(f"methods in {path} must be a list of names, got {shown(methods)}")
    return methods


def read_file(path: str | Path) -> dict[str, Any]:
    """Parse a TOML or YAML config file, or the ``config.json`` of a run folder, into a mapping name -> value.

    Raises:
      JaxpflError: if the file is missing, has an unknown suffix, does not parse, has too many values, or is not a
        table.
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
        raise JaxpflError(f"cannot parse config {path}: {one_line(error)}") from None
    _check_parts(values, path)
    if not isinstance(values, dict):
        raise JaxpflError(f"config {path} must be a table of names and values")
    return values


def _yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
      Exception: if the text does not parse, or a name appears twice in a mapping (PyYAML would keep the last value).
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)  # before merges (<<): merged names may be repeated
            names = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for (_, name), times in names.items():
                if times > 1:
                    raise ValueError(f"{shown(name)} appears twice in one mapping")
            return node

    return yaml.load(text, Loader)


def _check_parts(value: Any, path: Path) -> None:
    """Refuse a parsed YAML file that has too many values, or a value that contains itself.

    With aliases, a short file can repeat a value so often that a message with all values could not be printed.

    Raises:
      JaxpflError: if there are more than `_MOST_PARTS` values.
    """
    rest, parts = [value], 0
    while rest:
        part = rest.pop()
        parts += 1
        if parts > _MOST_PARTS:
            raise JaxpflError(f"config {path} contains more than {_MOST_PARTS} values, or a value that contains itself")
        rest += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def from_mapping(values: Mapping[str, Any], where: str) -> RunConfig:
    """Make a config from a mapping field name -> value, such as a parsed file.

    Field names may be written with dashes or underscores.

    Raises:
      JaxpflError: if a field is unknown or appears twice, or a value has the wrong type.
    """
    return _read_fields(RunConfig, values, where)


_TABLES: Mapping[str, type] = {"plan": ExecutionPlan, "privacy": PrivacyConfig}


def _read_fields(kind: type[T], values: Any, where: str, table: str = "") -> T:
    """Make a settings dataclass from the values in a file or in one of the file's tables."""
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
    """Flatten nested mappings; names are joined by dots and preceded by ``prefix``.

    Examples:
      >>> flat({"plan": {"devices": 2}, "lr": 0.1})
      {'plan.devices': 2, 'lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _settings(value: Any, where: str) -> tuple[str, ...]:
    """Return the setting ``set``, a list or a table in a config file, as entries METHOD.name=value."""
    if isinstance(value, dict):
        texts = {
            name: ",".join(map(str, one)) if isinstance(one, list) else str(one) for name, one in flat(value).items()
        }
        return tuple(f"{name}={text}" for name, text in texts.items())
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise JaxpflError(f"set in {where} must be a list of METHOD.name=value or a table, got {shown(value)}")


def _typed(value: Any, annotation: str, what: str) -> Any:
    """Return the value, converted if necessary to a type that the annotation allows.

    If the annotation allows floats, numbers and numeric strings are converted to float.

    Raises:
      JaxpflError: if the value has none of the allowed types.
    """
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
