"""The commands compare, run, data, export and deploy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import MISSING
from tyro.conf import Positional, UseAppendAction, arg

from jaxpfl.runs import compile_cache
from jaxpfl.runs.config import (
    TEST_USERS,
    ConfigFile,
    DataConfig,
    RunConfig,
    check_given,
    default_folder,
    preset_words,
    read,
    resolve,
)
from jaxpfl.support import signals
from jaxpfl.support.console import Console, claim_file, signed
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FILE, NEW_FOLDER

if TYPE_CHECKING:
    from jaxpfl.runs.tracking import Tracker

QUIET = "--quiet"


@dataclass(frozen=True)
class WriteFlags:
    """Flags for replacing earlier results, and for progress and notes."""

    force: bool = False
    """Replace earlier results of the same command in --output; a folder that contains anything else is refused."""
    quiet: bool = False
    """Print only the result and errors: no progress, notes or warnings (--strict turns warnings into errors)."""

    def check_force(self, output: Path | None, *, resume: bool) -> None:
        """Check that ``--force``, if given, is used with ``--output`` and without ``--resume``.

        Args:
          output: value of ``--output``.
          resume: whether ``--resume`` is given.

        Raises:
          JaxpflError: if ``--force`` is given and ``--output`` is missing, or ``--resume`` is given too.
        """
        if self.force and resume:
            raise JaxpflError("--resume continues the earlier results and --force replaces them: give only one of them")
        if self.force and output is None:
            raise JaxpflError("--force replaces the folder that --output names: give --output too")

    def notes(self, *, writes: bool = True) -> Console:
        """Return a console on standard error for progress and notes.

        Args:
          writes: whether this process prints; otherwise, or if ``--quiet`` is given, the console is silent.
        """
        return Console(stderr=True, quiet=self.quiet or not writes)

    def note(self, text: str) -> None:
        """Print a line on standard error, unless ``--quiet`` is given."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Session(WriteFlags):
    """Flags of a run for output, resuming, tracking, and several processes."""

    output: Annotated[Path | None, NEW_FOLDER] = None
    """Run folder (default: runs/COMMAND-DATA-HASH)."""
    resume: bool = False
    """Continue an earlier run of the same config from its last checkpoint."""
    config: Path | None = None
    """TOML or YAML file with flags and methods (methods = ["local", "adaped"]), or a run folder's config.json; flags on
    the command line take precedence."""
    json: bool = False
    """Print the summary as one JSON object and nothing else on standard output."""
    strict: bool = False
    """Turn warnings into errors."""
    profile: bool = False
    """Write a trace of a few rounds of each method to RUN/profile, for xprof or TensorBoard."""
    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard: means over the seeds, by method and round."""
    mlflow: Annotated[str | None, arg(metavar="URI")] = None
    """Also send each method's records to MLflow: address of its server, or a folder (needs the extra mlflow)."""
    wandb: Annotated[str | None, arg(metavar="PROJECT")] = None
    """Also send each method's records to this Weights & Biases project (needs the extra wandb)."""
    explain_plan: bool = False
    """Show how the run would be executed and why, and how much memory it would need; nothing is trained or written."""
    distributed: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Run in several processes: host and a free port of process 0, the same for every process. With auto, the
    address, --processes and --process are detected under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Only process 0
    prints and writes."""
    processes: int | None = None
    """Number of processes of a distributed run."""
    process: int | None = None
    """Index of this process in a distributed run, from 0."""
    distributed_token: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with a secret that all processes of a distributed run share; only you may be able to read it. The variable
    JAXPFL_DISTRIBUTED_TOKEN can give the secret instead. Needed unless the address is localhost."""


DEFAULT_METHODS = ("local", "fedavg", "fedavg-ft", "adaped")


@dataclass(frozen=True)
class Flags(RunConfig):
    """Flags of a run's config."""

    set: UseAppendAction[tuple[str, ...]] = ()
    """Hyper-parameter or option of a method, METHOD.name=value (with run, also name=value); may be repeated."""


_SESSION = Session()


def commands(args: list[str]) -> tuple[Callable[..., None], ...]:
    """Return the commands; a config file named in the arguments determines the defaults of their flags."""
    path = named_file(args)
    file = ConfigFile() if path is None else read(path)
    flags = Flags(**vars(file.config))
    data_flags = DataConfig(**{f.name: getattr(file.config, f.name) for f in fields(DataConfig)})
    named = ", ".join(file.methods)
    several = file.methods or DEFAULT_METHODS

    def run(
        method: Annotated[Positional[str], arg(metavar="METHOD", help="The method.")] = named or MISSING,
        settings: Annotated[Flags, arg(name="")] = flags,
        session: Annotated[Session, arg(name="")] = _SESSION,
    ) -> None:
        """Train one method and score every client's personalized model."""
        if len(file.methods) > 1 and method == named:
            raise JaxpflError(f"run trains one method, but {session.config} names {named}: choose one, or use compare")
        check_given(settings, file.recorded)
        _experiment("run", (method,), settings, session, file)

    def compare(
        methods: Annotated[Positional[tuple[str, ...]], arg(metavar="[METHODS ...]", help="The methods.")] = several,
        settings: Annotated[Flags, arg(name="")] = flags,
        session: Annotated[Session, arg(name="")] = _SESSION,
    ) -> None:
        """Train several methods on the same split and seeds, and compare them."""
        check_given(settings, file.recorded)
        _experiment("compare", methods or several, settings, session, file)

    def data(
        action: Annotated[
            Positional[Literal["list", "describe", "convert", "fetch"]],
            arg(help="List the data sets; describe or convert the split that the flags define; or fetch NAME."),
        ],
        name: Annotated[Positional[str], arg(metavar="[NAME]", help="The data set to download (fetch).")] = "",
        settings: Annotated[DataConfig, arg(name="")] = data_flags,
        json: bool = False,
        plot: Annotated[Path | None, NEW_FILE] = None,
        output: Annotated[Path | None, NEW_FOLDER] = None,
        config: Path | None = None,
    ) -> None:
        """List the data sets, describe or convert a split, or download a data set such as mnist.

        Args:
            json: Print one JSON object.
            plot: PNG file for a plot of the split (describe).
            output: Folder to create (convert). --data federation:FOLDER then reads the data from there, even data
                larger than memory (--plan.clients-in disk).
            config: TOML or YAML file with flags, or a run folder's config.json.
        """
        if (action == "fetch") != bool(name):
            raise JaxpflError("jaxpfl data fetch NAME downloads a data set; the other actions take it as --data NAME")
        if action == "fetch":
            from jaxpfl.data.sources.download import fetch

            print(f"{name}: {fetch(name, settings.data_dir)}")
            return
        check_given(RunConfig(**vars(settings)), file.recorded)
        _about(action, settings, json, plot, output)

    def export(
        run: Annotated[Positional[Path], arg(metavar="RUN", help="The run folder.")],
        output: Annotated[Path | None, NEW_FOLDER] = None,
        method: str | None = None,
        clients: tuple[int, ...] | None = None,
        seed: int | None = None,
        only_global: Annotated[bool, arg(name="global")] = False,
        private_only: bool = False,
        per_client: bool = False,
        stablehlo: bool = False,
        data_dir: str | None = None,
        json: bool = False,
    ) -> None:
        """Write the models of a finished run as .npz files: clients' personalized models and the global model.

        Args:
            output: Folder to create; RUN/models by default.
            method: Method of the run to export; all methods by default.
            clients: Ids of the clients to export; all clients by default.
            seed: Seed of the run to export; the first seed by default.
            only_global: Write only the global models.
            private_only: Write only what the method's privacy claim covers, and list the files of RUN that the claim
                does not cover.
            per_client: Write one file for each client, instead of one file with all clients.
            stablehlo: Also write each model as a program METHOD/alone/CLIENT.stablehlo, with parameters and scaling,
                which jax.export.deserialize reads without jaxpfl.
            data_dir: Current folder of the data sets, if it was moved since the run.
            json: Print the manifest of the files as one JSON object.
        """
        wanted = {"method": method, "clients": clients, "seed": seed, "per_client": per_client}
        kinds = {"only_global": only_global, "private_only": private_only, "stablehlo": stablehlo}
        _export(run, output, data_dir, json, **kinds, **wanted)

    def deploy(
        engine: Annotated[Positional[Literal["flower"]], arg(help="The engine of the federation: flower.")],
        folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The folder to create.")],
        method: str = named or MISSING,
        settings: Annotated[Flags, arg(name="")] = flags,
        check: bool = False,
        config: Path | None = None,
    ) -> None:
        """Write a Flower app that trains a method in a real federation, with the settings of a simulation.

        Args:
            method: The method.
            check: Repeat the simulation: nodes and server use the simulation's seed, and FOLDER/clients has the
                examples of the simulation's clients. Use this for checks only, because each node could then compute
                everyone's random numbers.
            config: TOML or YAML file with flags, or a run folder's config.json.
        """
        check_given(settings, file.recorded)
        _deploy(folder, method, settings, check=check)

    return compare, run, data, export, deploy


def named_file(args: list[str]) -> str | None:
    """Return the value of ``--config`` in the arguments; None if it is not given."""
    for i, text in enumerate(args):
        if text == "--config" and i + 1 < len(args):
            return args[i + 1]
        if text.startswith("--config="):
            return text.removeprefix("--config=")
    return None


def _experiment(
    command: str, methods: tuple[str, ...], settings: RunConfig, session: Session, file: ConfigFile
) -> None:
    from jaxpfl import algorithms
    from jaxpfl.runs import export, run_folder
    from jaxpfl.runs.control import Interrupted
    from jaxpfl.runs.run import open_folder, run_methods
    from jaxpfl.runs.setup import check_agreed, prepare
    from jaxpfl.runs.stored_run import check_data, check_recorded
    from jaxpfl.runs.terminal import Terminal, explain_plan, print_explanation, print_table
    from jaxpfl.support import distributed, processes

    with ExitStack() as stack:
        session.check_force(session.output, resume=session.resume)
        methods = algorithms.names_of(methods)
        _start(settings, session)
        writes = processes.is_first()
        out, err, status = Console(quiet=not writes), session.notes(writes=writes), 0

        def prepared() -> tuple[RunConfig, Any]:
            config = resolve(settings)
            initial = None if config.warm_start is None else export.read_parameters(config.warm_start)
            origin = None if config.warm_start is None else export.parameters_origin(config.warm_start)
            experiment = prepare(config, methods, strict=session.strict, initial=initial, origin=origin)
            if session.config is not None:
                check_recorded(session.config, file, experiment)
                check_data(session.config, file, experiment, strict=session.strict)
            return config, experiment

        config, experiment = processes.together(prepared)
        if processes.several():
            check_agreed(experiment)
        if session.explain_plan:
            report = explain_plan(experiment)
            print(json.dumps(report)) if session.json and writes else print_explanation(out, report)
            return
        if writes and (words := preset_words(settings, experiment.config)):
            session.note(words)
        own = session.output or default_folder(command, config, methods, session.resume)
        folder = Path(processes.on_first(lambda: str(own)))
        trackers: list[Tracker] = []
        processes.on_first(lambda: trackers.extend(_trackers(session, folder)))
        processes.on_first(lambda: stack.enter_context(run_folder.lock(folder)))
        kept = f"; kept in {folder}: the same command with --output {folder} --resume continues"
        # If a signal ends the process from here on, its message says how to resume the run.
        stack.enter_context(signals.noted(lambda: kept if writes and (folder / "config.json").exists() else ""))
        opened = partial(open_folder, folder, experiment, resume=session.resume, force=session.force)
        changes = processes.on_first(opened)
        if changes and writes:
            session.note(f"resuming {folder} with {'; '.join(changes)}")
        if processes.several():
            distributed.note(kept)
        given, headline = [experiment], experiment.headline
        del experiment  # so that `run_methods` holds the only reference and may free the examples
        with Terminal(err, headline) as reporter:
            try:
                summary = run_methods(given.pop(), folder, reporter, trackers, traced=session.profile)
            except Interrupted as stop:
                reporter.say(f"{stop}{kept}")
                if session.quiet and writes:
                    print(f"{stop}{kept}", file=sys.stderr)
                summary, status = None, stop.status
        if summary is not None and session.json and writes:
            print(json.dumps(summary))
        elif summary is not None:
            print_table(out, summary)
        if session.profile and writes and summary is not None and not session.json:
            out.print(f"traces: {folder / 'profile'} (xprof or tensorboard --logdir shows them)", soft_wrap=True)
    if summary is None:
        raise SystemExit(status)


def _start(settings: RunConfig, session: Session) -> None:
    """Set up JAX: use all CPU cores of this process, or join the other processes of a distributed run."""
    from jaxpfl.engine import use_cpu_cores

    if session.distributed is None:
        if (session.processes, session.process, session.distributed_token) != (None, None, None):
            raise JaxpflError("--processes, --process and --distributed-token require --distributed HOST:PORT")
        use_cpu_cores()
        compile_cache.enable()
        return
    if session.profile:
        raise JaxpflError("--profile traces a single process: leave it out with --distributed")
    from jaxpfl.support import distributed

    number, asked = session.processes or 1, settings.plan.devices
    each = max(1, int(asked) // number) if str(asked).isdecimal() else 1
    members, file = (session.processes, session.process), session.distributed_token
    token = None if file is None else distributed.read_token(file)
    distributed.start(session.distributed, *members, token=token, cpu_devices=each, on_wait=session.note)
    compile_cache.enable()


def _trackers(session: Session, folder: Path) -> Iterator[Tracker]:
    """Create the requested trackers; this raises if a package is missing, before the run begins."""
    from jaxpfl.runs.tracking import MLflow, TensorBoard, WandB

    if session.tensorboard:
        yield TensorBoard(folder)
    if session.mlflow is not None:
        yield MLflow(folder, session.mlflow)
    if session.wandb is not None:
        yield WandB(folder, session.wandb)


def _export(run: Path, output: Path | None, data_dir: str | None, as_json: bool, **wanted: Any) -> None:
    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs.export import Selection, export
    from jaxpfl.runs.run_folder import uncovered
    from jaxpfl.runs.terminal import print_export

    use_cpu_cores()
    compile_cache.enable()
    folder, manifest = export(run, output, Selection(**wanted), data_dir=data_dir)
    if wanted["private_only"]:
        manifest["not_covered"] = uncovered(run)
    if as_json:
        print(json.dumps({"folder": str(folder), **manifest}))
    else:
        print_export(Console(), folder, manifest)


def _deploy(folder: Path, method: str, settings: RunConfig, *, check: bool) -> None:
    from jaxpfl.deploy.agreement import Agreement
    from jaxpfl.deploy.flower import write_app
    from jaxpfl.engine import use_cpu_cores
    from jaxpfl.runs.setup import load_federation, prepare

    if settings.unseen_clients:
        raise JaxpflError("unseen_clients cannot be deployed: leave it out, as every additional node is a new client")
    use_cpu_cores()
    config = resolve(settings)
    source, raw = load_federation(config)
    experiment = prepare(config, (method,), given=(source, raw))
    given = experiment.runs[method].spec, experiment.federation, experiment.scaling
    write_app(folder, Agreement.of(*given, config.seed if check else None), raw if check else None)
    print(f"{folder}: flwr run {folder} runs {method} on {raw.num_clients} nodes; edit federation/data.py")


_DESCRIBE = "jaxpfl data describe"


def _about(action: str, settings: DataConfig, as_json: bool, plot: Path | None, output: Path | None) -> None:
    """List the data sets, describe a split or convert it, depending on ``action``.

    Raises:
      JaxpflError: if a flag does not apply to the action, or the data set cannot be loaded or split.
    """
    from jaxpfl import data

    if output is not None and action != "convert":
        raise JaxpflError(f"--output applies to jaxpfl data convert: leave it out with {action}")
    if plot is not None and action != "describe":
        raise JaxpflError(f"--plot applies to {_DESCRIBE}: leave it out with {action}")
    if action == "convert":
        _convert_data(settings, output, as_json)
        return
    if action == "list":
        entries = data.available(settings.data_dir)
        if as_json:
            print(json.dumps([entry._asdict() for entry in entries]))
            return
        for entry in entries:
            print(f"{entry.name:<16}{'ready' if entry.present else 'missing':<9}{entry.note}")
        return
    from jaxpfl.runs.data_sets import is_stored, is_table
    from jaxpfl.runs.results import client_clusters
    from jaxpfl.runs.setup import clients_of, load_federation

    claim_file(plot, "--plot", _DESCRIBE)
    config = resolve(RunConfig(**vars(settings)))
    source, federation = load_federation(config)
    if config.standardize:
        data.check_standardizable(source)
    clusters = client_clusters(config, source.num_classes)
    whole, unseen = None if is_stored(config.data) else source, None
    if config.unseen_clients == TEST_USERS:
        whole, unseen = data.seen(source), clients_of(config, source, federation)[1]
    task = config.named_task or source.task
    summary = data.summary(federation, source.num_classes, whole, clusters, task)
    if plot is not None:
        with signed(_DESCRIBE):
            data.plot_split(summary, plot)
    description = data.describe(summary) | {"standardized": config.standardize or is_table(config)}
    if unseen is not None:
        counts = {s: len(getattr(unseen, s).examples.y) for s in ("train", "validation", "test")}
        description["unseen"] = {"clients": unseen.num_clients, "examples": counts}
    if source.columns is not None:
        description["source"] = source.description
    if source.class_names is not None:
        description["class_names"] = source.class_names.tolist()
    print(json.dumps(description) if as_json else data.format_description(description))


def _convert_data(settings: DataConfig, output: Path | None, as_json: bool) -> None:
    from jaxpfl.runs.data_sets import PREFIX, convert
    from jaxpfl.support.host_memory import readable

    if output is None:
        raise JaxpflError("jaxpfl data convert requires --output, the folder to create")
    folder = output.absolute()
    federation = convert(resolve(RunConfig(**vars(settings))), folder).federation
    splits = {name: getattr(federation, name) for name in ("train", "validation", "test")}
    examples = {name: len(split.examples.y) for name, split in splits.items()}
    size = sum(path.stat().st_size for path in folder.iterdir())
    if as_json:
        _about = {"folder": str(folder), "clients": federation.num_clients, "examples": examples, "bytes": size}
        print(json.dumps(_about | {"data": f"{PREFIX}{folder}"}))
        return
    print(f"{federation.num_clients} clients, {sum(examples.values())} examples, {readable(size)}")
    print(f"train them with --data {PREFIX}{folder}, and --plan.clients-in disk if they do not fit in memory")
