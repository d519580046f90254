"""``--profile``: where the time went, to the last second, and a trace that can be read; the numbers stay the same."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from command import SMALL, jaxpfl
from jax.profiler import ProfileData

from jaxpfl.engine import compiled
from jaxpfl.engine.compiled import key_of
from jaxpfl.runs import operations, profile, trace
from jaxpfl.runs.operations import Event
from jaxpfl.runs.profile import PHASES, Recorder
from jaxpfl.runs.trace import Tracer


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profiled") / "run"


@pytest.fixture
def report(profiled: Path, capsys) -> dict:
    """A comparison with a profile, run once."""
    if not profiled.exists():
        result = jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--profile", "--json", "--output", profiled)
        assert result.status == 0, result.err
        assert json.loads((profiled / "summary.json").read_text()) == result.json
        for text in ("where the time went", "operations by own time", "perfetto_trace.json.gz"):
            assert text in result.err
    return json.loads((profiled / "profile" / "phases.json").read_text())


@pytest.mark.slow
def test_phases_sum_to_the_total(report: dict, profiled: Path):
    for name, row in json.loads((profiled / "summary.json").read_text())["methods"].items():
        assert row["compile_seconds"] == pytest.approx(report["methods"][name]["compile"], rel=0.1, abs=0.05)
        others = sum(seconds for phase, seconds in report["methods"][name].items() if phase != "compile")
        assert row["seconds"] < others
    assert tuple(report["phases"]) == PHASES
    assert sum(report["phases"].values()) == pytest.approx(report["total"], abs=1e-6)
    assert all(seconds >= 0 for seconds in report["phases"].values())
    for phase in ("data", "compile", "rounds", "evaluation", "checkpoints", "profiler", "host"):
        assert report["phases"][phase] > 0
    assert set(report["methods"]) == {"local", "adaped"}
    for phase in PHASES:
        assert sum(m[phase] for m in report["methods"].values()) <= report["phases"][phase] + 1e-6
    parts = report["compile"]
    compiling = sum(parts[name] for name in ("tracing", "lowering", "xla", "loading"))
    assert compiling == pytest.approx(report["phases"]["compile"])
    assert 0 <= parts["from_cache"] <= parts["programs"] < 100


@pytest.mark.slow
def test_traces_can_be_read_and_hold_the_rounds_that_they_say(report: dict, profiled: Path):
    assert set(report["traces"]) == {"local", "adaped"}
    for name, described in report["traces"].items():
        folder = Path(described["folder"])
        assert folder == profiled / "profile" / name
        first, last = described["rounds"]
        assert 2 <= first <= last <= 4
        (planes,) = folder.rglob("*.xplane.pb")
        found, events = operations.read(ProfileData.from_file(str(planes)))
        assert 100 < events < 250_000  # not the file's size: it holds every program that this process has compiled
        assert [row["name"] for row in described["operations"]] == [operation.name for operation in found[:30]]
        assert sum(described["kinds"].values()) == pytest.approx(1)
        assert any(operation.kind == "products" for operation in found)
        # One thread at a time per core: own times cannot exceed the time recorded, however deep the nesting.
        assert 0 < sum(operation.seconds for operation in found) < described["seconds"] * 2 * (os.cpu_count() or 1)
        assert all(operation.seconds >= 0 for operation in found)
        perfetto = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))
        assert "metadata" not in perfetto
        assert any(event.get("args", {}).get("hlo_op") == found[0].name for event in perfetto["traceEvents"])
    assert not list((profiled / "profile").glob(".*"))
    assert (profiled / "plots" / "profile.png").stat().st_size > 5000


@pytest.mark.slow
def test_numbers_and_config_are_those_of_a_run_without(report: dict, profiled: Path, tmp_path: Path, capsys):
    plain = tmp_path / "plain"
    assert jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--output", plain).status == 0
    assert not (plain / "profile").exists()
    assert (plain / "config.json").read_bytes() == (profiled / "config.json").read_bytes()

    def records(folder: Path) -> list[dict]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]

    assert records(plain) == records(profiled)
    again = jaxpfl(capsys, "compare", "local", "adaped", *SMALL, "--output", plain, "--resume", "--profile")
    assert again.status == 0
    assert "adaped: finished before" in again.err
    assert json.loads((plain / "profile" / "phases.json").read_text())["traces"] == {}


@pytest.mark.slow
def test_too_few_rounds_for_a_trace_are_said(tmp_path: Path, capsys):
    args = ("run", "local", *SMALL, "--rounds", "1", "--profile", "--output", tmp_path / "run")
    result = jaxpfl(capsys, *args)
    assert result.status == 0
    assert "local: no trace: the first call of rounds compiles" in result.out


def test_a_profiler_that_fails_does_not_fail_the_run(tmp_path: Path, capsys, monkeypatch):
    def busy(*_, **__) -> None:
        raise RuntimeError("Profile has already been started.")

    monkeypatch.setattr(jax.profiler, "start_trace", busy)
    result = jaxpfl(capsys, "run", "local", *SMALL, "--profile", "--output", tmp_path / "run")
    assert result.status == 0
    assert "no trace: Profile has already been started." in result.out


def test_a_clock_counts_the_compiling_of_its_own_thread_once(monkeypatch):
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    duration = jax.monitoring.record_event_duration_secs
    with profile.CompileClock() as clock:
        duration("/jax/core/compile/jaxpr_trace_duration", 0.01)  # inside the next
        duration("/jax/core/compile/backend_compile_duration", 0.03)
        other = threading.Thread(target=duration, args=("/jax/core/compile/backend_compile_duration", 9.0))
        other.start()
        other.join()
    duration("/jax/core/compile/backend_compile_duration", 9.0)
    assert clock.seconds == pytest.approx(0.03)


def test_a_clock_counts_the_wait_for_another_thread_that_compiles():
    key, began = key_of("waited for"), threading.Event()

    def make() -> int:
        began.set()
        time.sleep(0.05)
        return 1

    other = threading.Thread(target=compiled._found, args=(key, make))
    with profile.CompileClock() as clock:
        other.start()
        began.wait()
        assert compiled._found(key, make) == 1
        assert compiled._found(key, make) == 1
    other.join()
    assert 0.03 < clock.seconds < 1


def test_a_recorder_hears_nothing_after_its_end():
    with pytest.raises(KeyError), Recorder() as recorder:
        raise KeyError
    jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 1.0)
    assert not any(recorder._compile.values())


@pytest.mark.slow
def test_ctrl_c_keeps_the_rounds_and_a_readable_trace(tmp_path: Path, capsys):
    folder = tmp_path / "run"
    args = ["run", "adaped", *SMALL, "--rounds", "400", "--plan.rounds-per-call", "1", "--output", str(folder)]
    command = [sys.executable, "-m", "jaxpfl.cli", *args, "--profile"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    records = folder / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if records.exists() and records.read_text():
            break
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGINT)  # after the first round: before, in or after the traced one
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, "Traceback" in err) == (130, "", False)
    assert "--resume continues" in " ".join(err.split())
    assert "where the time went" in err
    assert not list((folder / "profile").glob(".*"))
    for planes in folder.rglob("*.xplane.pb"):
        assert operations.read_file(planes)[0]
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 1 <= max(rounds) < 400


def test_compiling_moves_out_of_the_phase_that_it_was_in(monkeypatch):
    part, now = "/jax/core/compile/{}_duration".format, [100.0]
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with Recorder() as recorder:
        with recorder.phase("rounds"):
            now[0] += 0.05
            jax.monitoring.record_event_duration_secs(part("jaxpr_trace"), 0.01)  # inside the next
            jax.monitoring.record_event_duration_secs(part("backend_compile"), 0.03)
            jax.monitoring.record_event_duration_secs("/jax/of/no/interest", 0.04)
        assert recorder._seconds["", "compile"] == pytest.approx(0.03)
        assert recorder._seconds["", "rounds"] == pytest.approx(0.02)
        parts = {"tracing": 0.01, "lowering": 0.0, "xla": 0.02, "loading": 0.0, "waiting": 0.0}
        assert recorder._compile == pytest.approx(parts)
        with recorder.phase("evaluation"):  # another clock may count longer than the phase was
            jax.monitoring.record_event_duration_secs(part("backend_compile"), 5.0)
        assert recorder._seconds["", "evaluation"] >= 0


def test_a_window_is_cut_and_the_next_one_longer(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(trace, "_SHORTEST", 0.02)
    monkeypatch.setattr(trace, "_EVENTS_PER_SECOND", 1e12)
    tracer = Tracer(tmp_path / "profile" / "local")
    step = jax.jit(lambda x: x @ x)
    step(jax.numpy.ones((8, 8)))

    def call(first: int, seconds: float) -> None:
        tracer.start()
        step(jax.numpy.ones((8, 8))).block_until_ready()
        time.sleep(seconds)
        tracer.stop(first, first + 1)

    call(1, 0.0)
    assert tracer.trace is None
    call(2, 0.3)
    cut = tracer.trace
    assert cut is not None
    assert (cut.first, cut.last, cut.whole) == (2, 3, False)
    assert 0.02 <= cut.seconds < 0.3
    assert tracer._window == pytest.approx(0.08)
    tracer._window = 60.0  # as long as a busy machine may take for one step
    call(4, 0.0)
    assert tracer.trace is not None
    assert (tracer.trace.first, tracer.trace.whole) == (4, True)
    assert len(list(tracer.trace.folder.rglob("*.xplane.pb"))) == 1
    call(6, 0.0)
    assert tracer.trace.first == 4


def test_own_time_leaves_out_what_is_inside():
    own, calls = defaultdict(float), defaultdict(int)
    events = [
        Event(100, 30, "dot.1"),
        Event(0, 500, None),  # the executor around everything
        Event(10, 400, "while.1"),
        Event(50, 200, None),  # the executor of the loop's body counts for the loop
        Event(140, 100, "all-reduce.1"),
        Event(150, 80, None),  # a wait counts for the exchange
        Event(420, 20, "dot.1"),
        Event(450, 10, None),
    ]
    operations.add_own_times(events, own, calls)
    assert own == {"while.1": 400 - 30 - 100, "dot.1": 50, "all-reduce.1": 100}
    assert calls == {"while.1": 1, "dot.1": 2, "all-reduce.1": 1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("dot.30", "products"), ("ynn_fusion.9", "products"), ("convolution.2", "products")),
        *(("copy.398", "copies"), ("bitcast_dynamic-update-slice_fusion.1", "copies"), ("wrapped_slice", "copies")),
        *(("all-reduce.24", "exchange"), ("reduce_scatter.36", "exchange"), ("psum.2", "exchange")),
        *(("while.1043", "loops"), ("call.24", "loops")),
        *(("multiply_add_fusion.6", "arithmetic"), ("copy_add_fusion", "arithmetic"), ("sort.3", "arithmetic")),
    ],
)
def test_kinds_go_by_name(name: str, kind: str):
    assert operations.kind_of(name) == kind


GPU = """
planes { name: "/host:CPU"
  lines { name: "launcher" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 stats { metadata_id: 1 str_value: "dot.1" } } }
  event_metadata { key: 1 value { id: 1 name: "dot.1" } } stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 stats { metadata_id: 1 str_value: "dot.1" } }
    events { metadata_id: 1 offset_ps: 3000000 duration_ps: 1000000 stats { metadata_id: 1 str_value: "dot.2" } }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 4000000 } }
  event_metadata { key: 1 value { id: 1 name: "sm90_gemm" } } event_metadata { key: 2 value { id: 2 name: "MemcpyH2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } } }
"""  # noqa: E501


def test_on_an_accelerator_the_streams_count_and_a_kernel_serves_many_operations():
    planes = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(GPU))
    found, events = operations.read(planes)
    assert [(o.name, o.calls, o.seconds) for o in found] == [
        ("dot.1", 1, pytest.approx(2e-6)),
        ("dot.2", 1, pytest.approx(1e-6)),
    ]
    assert events == 4
