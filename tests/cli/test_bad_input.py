"""Bad input is one clear line on standard error and exit status 2: no traceback, and no run folder left."""

import errno
import os

import numpy as np
import pytest
from command import SMALL, jaxpfl

SPENT = ("privacy", "epsilon", "--rounds", "9", "--delta", "1e-3", "--noise-multiplier")
PAPER = ("privacy", "paper", "--c1", "1", "--sigma1", "5", "--clients", "50", "--clients-per-round", "50")
SWEEP = ("sweep", "adaped", *SMALL[:12], "--grid")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "adaped", "--set", "adaped.psy_init=1"], "did you mean 'psi_init'?"),
        (["run", "local", "--batch-size", "500", "--strict"], "batch size 500 is larger"),
        (["run", "local", "--local-steps", "3000000000"], "--local-steps must be at most 2147483647, got '3000000000'"),
        (["run", "local", "--local-steps", "-3000000000"], "--local-steps must be at least -2147483647"),
        (["run", "fedavg", "--graph", "models", "--strict"], "graph = models has no effect: no method of the run"),
        (["run", "local", "--compress", "sign", "--strict"], "compress = sign has no effect: no method of the run"),
        (["run", "fedavg", "--privacy.epsilon", "1"], "privacy.delta is missing"),
        (["run", "local", "--data", "federation:none"], "none is not a saved federation: there is no such folder"),
        (
            ["run", "fedavg", "--privacy.epsilon", "8", "--privacy.delta", "0.2", "--strict"],
            "privacy.delta must be below 1 / clients = 0.166667, got 0.2",
        ),
        (["run", "local", "--output", "r", "--resume"], "nothing to resume in r: leave out --resume to start"),
        (["run", "local", "--plan.devices", "4"], "plan.devices must be at most 2 (the devices present), got 4"),
        (["run", "local", "--data", "mnist", "--data-dir", "nowhere"], "train-images-idx3-ubyte"),
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
    "error", [MemoryError("cannot allocate"), RuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes")]
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
        (["run", "local", *SMALL, "--config", "latin.toml"], "cannot read latin.toml: 'utf-8' codec"),
        ([*SPENT, "1e300"], "too large"),
        (["export", "run", "--global", "--clients", "1"], "--global exports only the global model"),
        (["run", "local", *SMALL, "--config", "."], "cannot read .: Is a directory"),
        (["run", "local", *SMALL, "--data", "npz:.", "--data-dir", "."], "cannot read .: Is a directory"),
        (["run", "local", *SMALL, "--warm-start", "/"], "/"),
        (["export", "/"], "/"),
        (["data", "convert", "--clients", "6"], "data convert requires --output"),
        (["data", "list", "--plot", "x.png"], "--plot applies to jaxpfl data describe"),
        (["privacy", "audit", "fedavg"], "fedavg is not private: set --privacy.epsilon or --privacy.noise-multiplier"),
        (["estimate", "histogram", "--data", "twitter"], "data must be synthetic, irc, csv:FILE or leaf:FOLDER"),
        ([*SPENT, "2", "--cohort", "5"], "--cohort requires --clients"),
        ([*SPENT, "1e-9"], "is too small for 9 rounds"),
        ([*PAPER, "--steps", "3000", "--delta", "1e-4", "--tau", "7"], "steps must be a multiple of tau (7), got 3000"),
        (["run", "fedavg", "--standardize"], "digits contains pixels, which are standardized when loaded"),
        (["run", "fedavg", *SMALL, "--seeds", "1000000000", "--output", "r"], "error: the states need "),
        (["run", "fedavg", "--output", "a" * 300], f"(File name too long), got '{'a' * 40}... (300 characters)'"),
        (["data", "describe", "--data", "npz:" + "a" * 300], "aaa: File name too long\n"),
        (["data", "fetch"], "jaxpfl data fetch NAME downloads a data set"),
        (["data", "fetch", "mnits"], "unknown downloadable data set 'mnits': did you mean 'mnist'?"),
        (["recommend", "--data", "digist"], "did you mean 'digits'"),
        (["recommend", "--clients", "10", "--cohort", "11"], "number of clients (10), got 11"),
        (["recommend", "--epsilon", "201"], "epsilon must be > 0 and <= 200, got 201.0"),
        (["recommend", "digits"], "only flags"),
        ([*SWEEP, "lr"], "--grid takes NAME=VALUE,VALUE"),
        ([*SWEEP, "psi_init=-1"], "adaped.psi_init must be"),
        ([*SWEEP, "model=mlp:4,mpl"], "did you mean 'mlp'?"),
        ([*SWEEP, "cohort=7,8"], "cohort must be between 1 and the number of clients (6), got 7"),
        ([*SWEEP, "lr=.1", "--output", "s", "--resume"], "nothing to resume in"),
        ([*SWEEP, "lr=.1", "--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1: no cluster answers"),
        ([*SWEEP, "lr=.1,1", "--plan.clients-in", "disk"], "plan.clients_in = disk supports single runs"),
        ([*SWEEP, "lr=.1", "--eval-every", "10"], "a sweep with eval_every = 10: a sweep scores and records each run"),
    ],
)
def test_files_and_numbers_that_cannot_be(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"rounds = 2 # \xe9")
    result = jaxpfl(capsys, *args)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1), result.err
    assert message in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"latin.toml"}


@pytest.mark.slow
def test_a_disk_that_is_full_is_named_with_the_way_on(capsys, tmp_path, monkeypatch):
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    args = ["run", "local", *SMALL, "--seeds", "1", "--output", tmp_path / "run"]
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        result = jaxpfl(capsys, *args)
    assert result.status == 2
    last = result.err.splitlines()[-1]
    assert f"{tmp_path / 'run' / 'methods' / 'local.npz'}" in last
    assert last.endswith("No space left on device; --resume continues from the last checkpoint")
    assert jaxpfl(capsys, *args, "--resume").status == 0
