"""Bad input is one clear line on standard error and exit status 2: no traceback, and no run folder left."""

import errno
import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl
from matplotlib.figure import Figure


def write_idx(folder: Path, name: str, array: np.ndarray, *, magic: int | None = None, cut: int = 0) -> None:
    code = magic if magic is not None else 0x0800 + array.ndim
    content = struct.pack(f">I{array.ndim}I", code, *array.shape) + array.astype(np.uint8).tobytes()
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"{name}.gz", "wb") as file:
        file.write(content[: len(content) - cut])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "adapd"], "unknown method 'adapd': did you mean 'adaped'?"),
        (["compare", "local", "local"], "each method can be named once"),
        (["run", "local", "--data", "digit"], "unknown data set 'digit': did you mean 'digits'?"),
        (["run", "local", "--partition", "class"], "did you mean 'classes'?"),
        (["run", "local", "--model", "mpl"], "did you mean 'mlp'?"),
        (["run", "local", "--cohort", "9"], "cohort must be between 1 and the number of clients (6), got 9"),
        (["run", "local", "--clients", "0"], "clients must be at least 1, got 0"),
        (["run", "local", "--clients", "4000"], "clients"),
        (["run", "local", "--classes-per-client", "11"], "classes"),
        (["run", "local", "--lr", "-0.1"], "lr must be > 0 and finite, got -0.1"),
        (["run", "local", "--client-optimizer", "adamm"], "unknown optimizer 'adamm': did you mean 'adam'?"),
        (["run", "fedavg", "--client-optimizer", "adam:b9=1"], "unknown argument of optimizer adam 'b9'"),
        (["run", "fedavg", "--server-optimizer", "fedyogy"], "did you mean 'fedyogi'?"),
        (["run", "fedavg", "--server-optimizer", "sgd:momentum=high"], "sgd:momentum must be a number >= 0 and < 1"),
        (["run", "fedavg", "--server-lr", "0"], "server_lr must be > 0 and finite, got 0.0"),
        (["run", "fedavg", "--set", "server_lr=-1"], "fedavg.server_lr must be > 0, got -1.0"),
        (["run", "local", "--set", "server_lr=1"], "unknown hyper-parameter of local 'server_lr'"),
        (["run", "pooled", "--set", "steps=-1"], "pooled.steps must be >= 0, got -1"),
        (["run", "adaped", "--set", "psi_floor=-1"], "adaped.psi_floor must be > 0, got -1.0"),
        (["run", "adaped", "--set", "adaped.psy_init=1"], "did you mean 'psi_init'?"),
        (["run", "adaped", "--set", "idle_round=5"], "did you mean 'idle_rounds'?"),
        (["run", "adaped", "--set", "c=five"], "adaped.c must be a float, got 'five'"),
        (["run", "fedavg-ft", "--set", "fine_tune_steps=-1"], "fine_tune_steps must be >= 0"),
        (["run", "local", "--batch-size", "500", "--strict"], "batch size 500 is larger"),
        (["run", "local", "--local-steps", "3000000000"], "--local-steps must be at most 2147483647, got '3000000000'"),
        (["run", "local", "--local-steps", "2000000000"], "2000000000 local steps of 5 examples are too many"),
        (
            ["run", "local", "--plan.clients", "0"],
            "plan.clients must be auto, map, vmap or a positive number",
        ),
        *(
            (["run", *flags, "--strict"], f"{what} changes nothing: {why}")
            for flags, what, why in (
                (["fedavg", "--graph", "models"], "graph = models", "no method of the run (fedavg) has a graph"),
                (["fedavg", "--neighbours", "3"], "neighbours = 3", "no method of the run (fedavg) has a graph"),
                (["network-lasso", "--graph", "a.csv", "--neighbours", "3"], "neighbours = 3", "a.csv says who is"),
                (["local", "--server-lr", "0.1"], "server_lr = 0.1", "no method of the run (local) has a server opt"),
                (["local", "--server-optimizer", "fedadam"], "server_optimizer = fedadam", "no method of the run"),
                (["local", "--compress", "sign"], "compress = sign", "no method of the run (local) uploads anything"),
                (
                    ["local", "--privacy.epsilon", "1", "--privacy.delta", "1e-3"],
                    "privacy.epsilon = 1.0",
                    "no method of the run (local) uploads anything",
                ),
                (["fedavg", "--adapt-rounds", "3"], "adapt_rounds = 3", "there are no unseen_clients"),
            )
        ),
        (
            ["run", "fedavg", "--privacy.epsilon", "8", "--privacy.delta", "0.2", "--strict"],
            "privacy.delta = 0.2 is not below 1 / clients = 0.166667",
        ),
        (["run", "local", "--output", "r", "--resume"], "nothing to resume in r: leave out --resume to start"),
        (["run", "local", "--dropout", "1"], "dropout must be >= 0 and < 1, got 1.0"),
        (["run", "local", "--stragglers", "-0.5"], "stragglers must be >= 0 and <= 1, got -0.5"),
        (["run", "local", "--same-stragglers"], "same_stragglers needs stragglers > 0"),
        (["run", "local", "--unseen-clients", "-1"], "unseen_clients must be at least 0, or test, got -1"),
        (["run", "local", "--adapt-rounds", "-2"], "adapt_rounds must be at least 0, got -2"),
        (["run", "local", "--unseen-clients", "4000"], "clients"),
        (["run", "adaped", "--set", "idle_rounds=-1"], "adaped.idle_rounds must be >= 0, got -1"),
        (["run", "adaped", "--set", "architectures=same+cmn"], "unknown model 'cmn': did you mean 'cnn'?"),
        (["run", "adaped", "--set", f"architectures={'+'.join(['same'] * 7)}"], "group 6 of 7 has no client"),
        (["run", "fedper"], "fedper needs a model with a body to share"),
        (["run", "persfl"], "persfl chooses on validation examples: 6 of 6 clients have none"),
        (["run", "zzz"], "unknown method 'zzz' (known: adamix, adaped"),
        (
            ["run", "adamix", "--set", "components=4"],
            "adamix.components must be at most the 3 clients of a round, got 4",
        ),
        (["run", "map-laplace", "--set", "lr_scale=2"], "map-laplace.lr_scale must be >= 0 and <= 1, got 2.0"),
        (
            ["run", "ifca", "--partition", "iid", "--clients", "1", "--cohort", "1"],
            "ifca needs at least 2 clients, got 1",
        ),
        (["run", "ifca", "--unseen-clients", "3", "--set", "clusters=7"], "ifca.clusters must be <= 6, the number of"),
        (["run", "persfl", "--validation-share", "0.2", "--set", "stored=1"], "persfl.stored must be 0 or >= 2, got 1"),
        (["run", "ifca", "--set", "clusters=7"], "ifca.clusters must be <= 6, the number of clients, got 7"),
        (["run", "local", "--plan.devices", "4"], "plan.devices must be at most the 2 present, got 4"),
        (["run", "local", "--data", "mnist", "--data-dir", "nowhere"], "train-images-idx3-ubyte"),
        (["run", "local", "--config", "none.toml"], "cannot read none.toml"),
        (["run", "local", "--output", "/proc/none/run"], "cannot write to /proc/none/run"),
    ],
)
def test_one_line(capsys, tmp_path, monkeypatch, args: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    names = 1 + next((i for i, a in enumerate(args[1:]) if a.startswith("--")), len(args) - 1)
    result = jaxpfl(capsys, *args[:names], *SMALL, *args[names:], "--json")
    assert result.status == 2
    assert result.out == ""
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("error: ")
    assert message in result.err
    assert not list(tmp_path.rglob("summary.json"))
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [({"cut": 7}, "train-images"), ({"magic": 0x0D03}, "train-images")],
    ids=["truncated", "wrong magic number"],
)
def test_damaged_idx_files(capsys, tmp_path, damage: dict, message: str):
    images, labels = np.zeros((40, 4, 4)), np.arange(40) % 10
    write_idx(tmp_path / "own", "train-images-idx3-ubyte", images, **damage)
    write_idx(tmp_path / "own", "train-labels-idx1-ubyte", labels)
    result = jaxpfl(
        capsys,
        "run",
        "local",
        *SMALL,
        "--data",
        "idx:own",
        "--data-dir",
        tmp_path,
        "--output",
        tmp_path / "r",
    )
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_clients_without_training_data_are_named_or_dropped(capsys, tmp_path):
    # Forty examples for fifty clients: some get none.
    for part in ("train", "t10k"):
        write_idx(tmp_path / "own", f"{part}-images-idx3-ubyte", np.zeros((40, 4, 4)))
        write_idx(tmp_path / "own", f"{part}-labels-idx1-ubyte", np.arange(40) % 10)
    args = ["run", "local", *SMALL, "--data", "idx:own", "--data-dir", tmp_path, "--partition", "iid"]
    args += ["--clients", "50", "--json"]
    result = jaxpfl(capsys, *args, "--output", tmp_path / "a")
    assert result.status == 2
    assert "no training data" in result.err
    assert "--drop-empty" in result.err
    result = jaxpfl(capsys, *args, "--drop-empty", "--output", tmp_path / "b")
    assert result.status == 0, result.err
    assert "left out 10 of 50 clients" in result.err
    assert result.json["clients"] == 40


@pytest.mark.slow
def test_a_batch_larger_than_a_client_is_warned_about_once(capsys, tmp_path):
    args = ["compare", "local", "fedavg", *SMALL, "--batch-size", "500", "--json"]
    result = jaxpfl(capsys, *args, "--output", tmp_path / "r")
    assert result.status == 0
    assert result.err.count("batch size 500 is larger than the training data of 6 of 6 clients") == 1


@pytest.mark.slow
def test_a_flag_that_some_method_uses_is_not_warned_about(capsys):
    used = ["--compress", "sign", "--server-lr", "0.5", "--unseen-clients", "1", "--adapt-rounds", "3", "--strict"]
    result = jaxpfl(capsys, "compare", "local", "fedavg", *SMALL, *used, "--explain-plan", "--json")
    assert (result.status, result.err) == (0, "")


@pytest.mark.slow
def test_a_diverging_rate_is_reported_and_does_not_stop_the_others(capsys, tmp_path):
    args = ["compare", "local", "fedavg", *SMALL, "--set", "fedavg.lr=1e38", "--output", tmp_path / "r"]
    result = jaxpfl(capsys, *args)
    assert result.status == 0
    assert "fedavg: 6 of 6 clients diverged" in result.out
    assert "local" in result.out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("cannot allocate"),
        RuntimeError("INTERNAL: Out of memory allocating 9"),
        RuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes"),
        RuntimeError("can't start new thread"),
    ],
)
def test_memory_that_runs_out_is_one_line(capsys, monkeypatch, error):
    def load(*_, **__) -> None:
        raise error

    monkeypatch.setattr("jaxpfl.data.load", load)
    result = jaxpfl(capsys, "run", "local", "--json")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("error: out of memory: ")


def test_another_error_of_the_runtime_is_no_users(capsys, monkeypatch):
    def load(*_, **__) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("jaxpfl.data.load", load)
    with pytest.raises(RuntimeError, match="a defect"):
        jaxpfl(capsys, "run", "local", "--json")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "network-lasso", *SMALL, "--graph", "empty.csv"], "graph = empty.csv has no edges"),
        (["run", "local", *SMALL, "--config", "latin.toml"], "cannot read latin.toml: 'utf-8' codec"),
        (["privacy", "epsilon", "--noise-multiplier", "1e300", "--rounds", "9", "--delta", "1e-3"], "too large"),
        (["export", "run", "--global", "--clients", "1"], "--global leaves the clients' models out"),
        (["export", "run", "--clients"], "clients must be at least one id, got none"),
        (["data", "describe", "--plot", "/"], "--plot must be a file to write, and this is a folder: got '/'"),
        (["run", "local", *SMALL, "--output", ""], "--output must be a path, got ''"),
        (["run", "local", *SMALL, "--output", "empty.csv"], "--output must be a folder, and this is a file"),
        (["run", "local", *SMALL, "--output", "empty.csv/r"], "--output must be in a folder, and"),
        (["run", "local", *SMALL, "--config", "."], "cannot read .: Is a directory"),
        (["run", "local", *SMALL, "--rounds", "1000000000000"], "--rounds must be at most 2147483647, got"),
        (["run", "local", "--config", "many.toml"], "rounds must be at most 2147483647, got 1000000000000"),
        (["run", "local", *SMALL, "--data", "npz:.", "--data-dir", "."], "a folder, not an .npz archive"),
        (["run", "local", *SMALL, "--warm-start", "/"], "/"),
        (["run", "local", *SMALL, "--graph", ".", "--strict"], "graph"),
        (["data", "describe", "--data", "mnist", "--data-dir", "empty.csv"], "empty.csv"),
        (["estimate", "gaussian", "--csv", "."], "."),
        (["estimate", "compression", "--alpha", "-1", "--steps", "2"], "alpha must be > 0 and finite, got -1.0"),
        (["estimate", "histogram", "--unseen", "0"], "shares of users set apart must be > 0"),
        (["export", "/"], "/"),
        (["export", "empty.csv"], "empty.csv"),
    ],
)
def test_files_and_numbers_that_cannot_be(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "latin.toml").write_bytes(b"rounds = 2 # \xe9")
    (tmp_path / "many.toml").write_text("rounds = 1000000000000")
    result = jaxpfl(capsys, *args)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1), result.err
    assert message in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"empty.csv", "latin.toml", "many.toml"}


@pytest.mark.parametrize("args", [["--seeds", "1000000000"], ["--model", "mlp:99999999"]])
def test_a_refusal_before_the_first_round_is_one_line(capsys, tmp_path, args):
    """The progress display has nothing to show then."""
    result = jaxpfl(capsys, "run", "fedavg", *SMALL, *args, "--output", tmp_path / "run")
    assert result.status == 2
    assert result.err.startswith("error: the states need ")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_name_too_long_for_the_system_is_one_line(capsys):
    result = jaxpfl(capsys, "run", "fedavg", *SMALL, "--output", "a" * 300)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert f"--output is no path: File name too long: got '{'a' * 40}... (300 characters)'" in result.err
    result = jaxpfl(capsys, "data", "describe", "--data", "npz:" + "a" * 300)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "Errno" not in result.err


@pytest.mark.slow
@pytest.mark.parametrize(("where", "named"), [("methods", "methods/local.npz"), ("plots", "plots/accuracy.png")])
def test_a_disk_that_is_full_is_named_with_the_way_on(capsys, tmp_path, monkeypatch, where, named):
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    args = ["run", "local", *SMALL, "--seeds", "1", "--output", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setattr(*((np, "savez") if where == "methods" else (Figure, "savefig")), full)
        result = jaxpfl(capsys, *args)
    assert result.status == 2
    last = result.err.splitlines()[-1]
    assert f"{tmp_path / 'run' / named}" in last
    assert last.endswith("No space left on device; --resume goes on from the last checkpoint")
    assert jaxpfl(capsys, *args, "--resume").status == 0
