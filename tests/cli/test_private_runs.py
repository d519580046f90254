"""Private runs from the command line: the statement, where it is stored, what is refused, and what may resume."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress

import jax
import numpy as np
import pyarrow
import pytest
from command import SMALL, jaxpfl

from jaxpfl import JaxpflError, load_models
from jaxpfl.engine import Simulation, noise_keys
from jaxpfl.privacy.statement import SAME_USERS, SPENT_BEFORE
from jaxpfl.runs import run_folder
from jaxpfl.runs.export import _COVERED, parameters_origin
from jaxpfl.runs.stored_run import last_state, open_run

BUDGET = ["--privacy.epsilon", "4", "--privacy.delta", "1e-3"]


@pytest.mark.slow
def test_a_budget_is_calibrated_stated_and_stored(capsys, tmp_path):
    folder, methods = tmp_path / "run", ("local", "fedavg", "adaped")
    shown = jaxpfl(capsys, "compare", *methods, *SMALL, *BUDGET, "--output", folder)
    assert shown.status == 0, shown.err
    said = " ".join(shown.out.split())
    assert "fedavg, adaped: eps = 4 at delta = 0.001 for each user (add-or-remove-one, by pld; poisson" in said
    summary = json.loads((folder / "summary.json").read_text())["methods"]
    assert summary["local"]["privacy"] is None
    assert summary["local"]["bytes_down"] == 0
    claim = summary["adaped"]["privacy"]
    assert claim["relation"] == "add-or-remove-one"
    assert (claim["unit"], claim["delta"], claim["rounds"], claim["clipping_norm"]) == ("user", 1e-3, 4, 1.0)
    assert claim["epsilon"] == pytest.approx(4, rel=1e-3)
    assert claim["sampling_rate"] == pytest.approx(0.5, abs=1e-6)
    assert claim["paper_epsilon"] is not None
    again = jaxpfl(
        capsys,
        *("privacy", "epsilon", "--noise-multiplier", str(claim["noise_multiplier"])),
        *("--sampling-rate", str(claim["sampling_rate"]), "--rounds", "4", "--delta", "1e-3"),
    )
    assert again.json["epsilon"] == pytest.approx(claim["epsilon"], rel=1e-3)


@pytest.mark.slow
def test_a_clipping_norm_far_from_the_uploads_is_remarked_on(capsys, tmp_path):
    command = ("compare", "local", "fedavg", *SMALL, *BUDGET, "--privacy.clipping-norm", "50", "--output", tmp_path)
    said = " ".join(jaxpfl(capsys, *command).out.split())
    assert "fedavg: the clipping norm is 50, and the median norm of the uploads is" in said
    assert "for 6 clients, privacy.unit = example protects individual examples with less noise" in said
    assert "local: the clipping norm" not in said


@pytest.mark.slow
def test_what_a_private_run_does_not_go_on_with(capsys, tmp_path):
    """More rounds need more noise in each, and the first ones had less. Checkpoints of an older version hold no key for
    the noise: another one would draw what other runs of the seed have drawn."""
    args = ["run", "fedavg", *SMALL, *BUDGET, "--output", tmp_path / "run"]
    assert jaxpfl(capsys, *args).status == 0
    assert jaxpfl(capsys, *args, "--resume").status == 0
    refused = jaxpfl(capsys, *args, "--resume", "--rounds", "6")
    assert refused.status == 2
    assert "privacy.noise_multiplier" in refused.err
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record.pop("noise") == 2
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    refused = jaxpfl(capsys, *args, "--resume")
    assert refused.status == 2
    assert "an older version drew its noise differently" in refused.err


@pytest.mark.slow
def test_clipping_without_noise_claims_nothing(capsys, tmp_path):
    flags = ["--privacy.noise-multiplier", "0", "--privacy.clipping-norm", "0.1", "--participation", "uniform"]
    shown = jaxpfl(capsys, "run", "fedavg", *SMALL, *flags, "--output", tmp_path / "run")
    assert shown.status == 0, shown.err
    assert "no epsilon can be claimed" in " ".join(shown.out.split())
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]["fedavg"]["privacy"]
    assert stored["epsilon"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("fedavg", ["--cohort", "6", "--privacy.noise", "distributed", "--privacy.min-uploads", "5"]),
        ("adaped", ["--cohort", "6", "--privacy.noise", "per_step", "--privacy.joint"]),
        ("fedavg", ["--privacy.quantile", "0.5"]),
    ],
    ids=["distributed", "per step", "adaptive"],
)
def test_other_mechanisms(capsys, tmp_path, method, flags):
    budget = ["--privacy.epsilon", "9", "--privacy.delta", "1e-3"]
    shown = jaxpfl(capsys, "run", method, *SMALL, *budget, *flags, "--json", "--output", tmp_path / "run")
    assert shown.status == 0, shown.err
    claim = shown.json["methods"][method]["privacy"]
    assert claim["epsilon"] == pytest.approx(9, rel=1e-3)
    relations = {"--cohort": "zero-out", "--privacy.quantile": "add-or-remove-one"}
    assert claim["relation"] == relations[flags[0]]


NOISY = ["--privacy.noise-multiplier", "1", "--privacy.delta", "1e-3"]


def key_is_gone(folder):
    run = open_run(folder)
    return noise_keys.is_gone(last_state(run, run.experiment(), "fedavg", 0)[1])


@pytest.mark.slow
def test_a_secret_seed_is_gone_when_the_run_ends(capsys, tmp_path):
    args = ["run", "fedavg", *SMALL, *NOISY, "--privacy.noise-seed", "secret"]
    folder = tmp_path / "run"
    shown = jaxpfl(capsys, *args, "--output", folder)
    assert shown.status == 0, shown.err
    assert "has the secret seed of the noise" in " ".join(shown.err.split())
    claim = json.loads((folder / "summary.json").read_text())["methods"]["fedavg"]["privacy"]
    assert claim["noise_seed"] == "secret"
    assert "noise from the operating system" in claim["says"]
    assert [path.name for path in (folder / "checkpoints" / "fedavg").iterdir()] == ["4"]
    assert key_is_gone(folder)
    still = ("--patience", "1", "--validation-share", "0.3", "--lr", "1e-9", "--rounds", "8", "--eval-every", "1")
    jaxpfl(capsys, *args, *still, "--output", tmp_path / "early")
    assert [path.name for path in (tmp_path / "early" / "checkpoints" / "fedavg").iterdir()] != ["8"]
    assert key_is_gone(tmp_path / "early")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    refused = jaxpfl(capsys, *args, "--output", folder, "--resume", "--rounds", "6")
    assert refused.status == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert "privacy.noise_seed = secret: the seed was deleted after round 4" in refused.err
    assert jaxpfl(capsys, "run", "fedavg", *SMALL, *NOISY, "--privacy.noise-seed", "os").status == 2


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4])
def test_no_byte_of_a_secret_key_stays(capsys, tmp_path, monkeypatch, stop):
    """Not in an older checkpoint, nor in one whose writing was cut off, after a stop in the run or with its last round.

    The key is found in the checkpoints of a run that was stopped before its end, so the search can fail.
    """
    folder, keys, calls, advance = tmp_path / "run", [], [], Simulation.advance

    def stopped(self, state, rounds):
        keys.extend(np.asarray(jax.random.key_data(state.noise)))
        calls.append(rounds)
        if len(calls) == stop:
            signal.raise_signal(signal.SIGINT)
        return advance(self, state, rounds)

    def texts(raw: bytes) -> Iterator[bytes]:
        """The bytes of a file, and those of each compressed part of it."""
        yield raw
        for frame in re.finditer(re.escape(b"\x28\xb5\x2f\xfd"), raw):
            stream, text = pyarrow.CompressedInputStream(pyarrow.BufferReader(raw[frame.start() :]), "zstd"), b""
            with suppress(OSError):  # what stands behind the part
                while more := stream.read(1):
                    text += more
            yield text

    def found() -> set[str]:
        every = [(path, text) for path in folder.rglob("*") if path.is_file() for text in texts(path.read_bytes())]
        holds = [path for path, text in every if any(key.tobytes() in text for key in keys)]
        return {path.relative_to(folder / "checkpoints" / "fedavg").parts[0] for path in holds}

    monkeypatch.setattr(Simulation, "advance", stopped)
    args = ["run", "fedavg", *SMALL, *NOISY, "--privacy.noise-seed", "secret", "--plan.rounds-per-call", "1"]
    assert jaxpfl(capsys, *args, "--output", folder).status == 130
    assert found() == ({"2", "3"} if stop == 3 else set())
    if stop == 3:  # as a process leaves it that is killed while it writes
        shutil.copytree(folder / "checkpoints" / "fedavg" / "3", folder / "checkpoints" / "fedavg" / ".3.partial")
        assert ".3.partial" in found()
    assert jaxpfl(capsys, *args, "--output", folder, "--resume").status == 0
    assert keys[0].any()
    assert found() == set()


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["user", "example"])
def test_what_no_claim_covers_is_listed_and_not_exported(capsys, tmp_path, unit):
    """Each file of the folder has a kind, which says what it holds; a new kind must be added to `CONTENTS`."""
    methods = {"user": ("local", "fedavg"), "example": ("ditto",)}[unit]
    folder, models, some = tmp_path / "run", tmp_path / "private", ("--private-only", "--method", methods[-1])
    flags = ("--privacy.unit", unit, *NOISY, "--tensorboard", "--profile")
    flags += ("--plan.clients-in", "disk") * (unit == "example")
    shown = jaxpfl(capsys, "compare", *methods, *SMALL, *flags, "--output", folder)
    assert shown.status == 0, shown.err
    for command in (("report", folder), ("export", folder)):
        assert jaxpfl(capsys, *command).status == 0
    listed = run_folder.uncovered(folder)
    assert (
        {path.name for path in folder.iterdir()} == listed.keys() > {"report.html", "tensorboard", "profile", "models"}
    )
    assert listed.items() <= run_folder.CONTENTS.items()
    stored = json.loads((folder / "summary.json").read_text())["not_covered"]
    assert listed.keys() - stored.keys() == {"report.html", "models"}  # written later
    assert "clients.npz, config.json" in " ".join(shown.out.split())
    assert "Not covered: clients.npz" in (folder / "report.html").read_text()
    (folder / "mine").touch()
    if unit == "user":
        refused = jaxpfl(capsys, "export", folder, "--private-only", "--method", "local", "--output", models)
        assert f"local of {folder} has no privacy claim" in refused.err
    shown = jaxpfl(capsys, "export", folder, *some, "--output", models, "--seed", "1")
    assert shown.status == 0, shown.err
    assert "not covered, not exported: clients.npz (every client's name" in shown.out
    assert "mine (a file that is not part of the run)" in shown.out
    kinds = {"user": ("global",), "example": ("global", "personal")}[unit]
    files = {str(path.relative_to(models)) for path in models.rglob("*") if path.is_file()}
    own = {f"{methods[-1]}/{kind}.{ending}" for kind in kinds for ending in ("npz", "stablehlo")}
    assert files == {"manifest.json", "SHA256SUMS", *own}
    manifest = json.loads((models / "manifest.json").read_text())
    assert manifest.keys() == {*_COVERED, "privacy"}
    assert manifest["privacy"]["unit"] == unit
    loaded = load_models(models)
    assert len(loaded.client_ids) == (0 if unit == "user" else 6)
    with pytest.raises(JaxpflError, match="export the run again, without --private-only"):
        loaded.predict(None, np.zeros((1, 8, 8, 1)))
    assert parameters_origin(str(models)) is None  # so that the claim of a run that starts from them says `GIVEN_START`
    if unit == "user":
        shutil.copy(folder / "methods" / "fedavg.json", folder / "methods" / "local.json")
        refused = jaxpfl(capsys, "export", folder, "--private-only", "--output", tmp_path / "both")
        assert "local, fedavg have claims, whose epsilons add up: choose one with --method" in refused.err


@pytest.mark.slow
def test_a_start_from_a_model_of_the_same_users_is_said(capsys, tmp_path):
    for name, flags in (("open", []), ("private", NOISY)):
        assert jaxpfl(capsys, "run", "fedavg", *SMALL, *flags, "--output", tmp_path / name).status == 0
    for name, caveat in (("open", SAME_USERS), ("private", SPENT_BEFORE)):
        args = ["run", "fedavg", *SMALL, *NOISY, "--warm-start", tmp_path / name]
        shown = jaxpfl(capsys, *args, "--output", tmp_path / f"after {name}")
        assert shown.status == 0, shown.err
        assert caveat in " ".join(shown.err.split())
        summary = json.loads((tmp_path / f"after {name}" / "summary.json").read_text())
        assert caveat in summary["methods"]["fedavg"]["privacy"]["says"]
    assert jaxpfl(capsys, *args, "--output", tmp_path / "strict", "--strict").status == 2
