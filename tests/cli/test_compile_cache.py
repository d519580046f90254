"""Compiled programs are kept between processes, in a folder of the package's own, and nothing ever fails for it."""

import json
import os
from pathlib import Path

import jax
import pytest
from command import SMALL, timeless
from forks import Forked

from jaxpfl.engine import programs
from jaxpfl.runs import compile_cache

CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")


@pytest.fixture
def unset(monkeypatch, tmp_path: Path):
    """JAX as a fresh process has it, with a home of the test's own; nothing may be compiled inside."""
    for name in CACHE:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in CACHE}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield tmp_path
    programs.keep_in(None)
    for name, value in before.items():
        jax.config.update(name, value)


def run(cache: Path, output: Path) -> tuple[dict, str]:
    """A run in a process of its own: its summary, and what it wrote on standard error."""
    process = Forked("run", "adaped", *SMALL, "--json", "--output", output, XDG_CACHE_HOME=str(cache))
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled_and_a_broken_entry_heals(tmp_path: Path):
    cold, _ = run(tmp_path, tmp_path / "cold")
    (folder,) = (tmp_path / "jaxpfl").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    # Whole programs, which are found without tracing, and JAX's own entries, which serve where our code changed.
    kinds = [{path: path.stat().st_size for path in folder.glob(f"{kind}-cache")} for kind in ("program-*", "jit_*")]
    # As a kill or a full disk leaves them.
    broken = [max(entries, key=lambda path, entries=entries: entries[path]) for entries in kinds]
    for path in broken:
        path.write_bytes(path.read_bytes()[:1000])

    held = {path: path.stat().st_mtime_ns for path in folder.glob("program-*-cache")}
    warm, said = run(tmp_path, tmp_path / "warm")
    now = {path: path.stat().st_mtime_ns for path in folder.glob("program-*-cache")}
    assert now.keys() == held.keys()
    assert [path for path in now if now[path] != held[path]] == [broken[0]]
    for path, entries in zip(broken, kinds, strict=True):
        assert path.stat().st_size == pytest.approx(entries[path], rel=0.1)
    assert not any(word in said for word in ("cache entry", "Warning", "cpu_aot_loader", "E0000", "Traceback"))
    assert timeless(cold) == timeless(warm)


FIT = """
import jax, jaxpfl
federation = jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3)
own = jaxpfl.Model(lambda key, x: {"w": jax.numpy.zeros((64, 10))}, lambda params, x: x.reshape(-1, 64) @ params["w"])
heard = []
jax.monitoring.register_event_duration_secs_listener(lambda event, _, **about: heard.append((event, about)))
jaxpfl.fit("local", federation, rounds=2, model=own)
print(sum("backend_compile" in event and "runs" in about.get("fun_name", "") for event, about in heard))
print(sum(event == "/jaxpfl/programs/load_duration" for event, _ in heard))
"""


@pytest.mark.slow
def test_a_second_process_compiles_no_program_of_fit(tmp_path: Path):
    """Not even those of a model of the user's own."""
    said = [Forked(code=FIT, XDG_CACHE_HOME=str(tmp_path)).communicate() for _ in range(2)]
    assert [(out.split(), err) for out, err in said] == [(["3", "0"], ""), (["0", "3"], "")]


def test_enabled_in_the_users_cache_folder(unset):
    folder = compile_cache.enable()
    assert folder.parent == unset / "jaxpfl"
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("which", ["folder", "parent"])
def test_a_folder_that_others_can_write_is_not_used(unset, which):
    folder = compile_cache.enable()
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache._prepared.cache_clear()  # as another process
    (folder if which == "folder" else folder.parent).chmod(0o770)
    assert compile_cache.enable() is None


def test_another_machine_or_jaxlib_has_another_folder(unset, monkeypatch):
    here = compile_cache._folder("", "0.10.2")
    assert here == compile_cache._folder("", "0.10.2")
    assert here != compile_cache._folder("", "0.10.3")
    monkeypatch.setattr(compile_cache.platform, "machine", lambda: "another")
    assert here != compile_cache._folder("", "0.10.2")


@pytest.mark.parametrize("value", ["", "elsewhere"])
def test_a_folder_that_the_user_set_wins(unset, monkeypatch, value: str):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", value)
    assert compile_cache.enable() is None
    assert not list(unset.iterdir())


@pytest.mark.parametrize(("name", "value"), [(CACHE[0], "elsewhere"), (CACHE[-1], False)])
def test_a_choice_after_the_first_fit_wins(unset, name: str, value: object):
    folder = compile_cache.keep_programs()
    assert folder is not None
    assert folder == programs._folder
    jax.config.update(name, value)
    assert compile_cache.keep_programs() is None
    assert programs._folder is None


def test_a_place_that_cannot_be_written_is_no_error(unset):
    (unset / "jaxpfl").write_text("a file where the folder would be")
    assert compile_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_trimming_takes_the_longest_unused_of_all_folders(tmp_path: Path):
    tuned = f"xla-b/{jax.config.jax_persistent_cache_enable_xla_caches}"
    for folder, name, age in (("xla-a", "old", 30), (tuned, "oldest", 50), ("xla-b", "older", 40), ("xla-b", "new", 0)):
        path = tmp_path / folder / f"{name}-cache"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    other = tmp_path / "xla-a" / "notes.txt"
    other.write_bytes(bytes(500))
    compile_cache.trim(tmp_path, 400)
    assert len(list(tmp_path.rglob("*-cache"))) == 4
    compile_cache.trim(tmp_path, 300)
    assert len(list(tmp_path.glob("*/*-cache"))) == len(list(tmp_path.rglob("*-cache"))) == 3
    compile_cache.trim(tmp_path, 150)
    assert [path.name for path in tmp_path.glob("*/*-cache")] == ["new-cache"]
    assert other.exists()


def test_only_warnings_about_this_cache_are_dealt_with(unset):
    text = "Error reading persistent compilation cache entry for 'jit_runs': error: Error -5"
    assert not compile_cache.repair(text)  # no cache, so not ours
    folder = compile_cache.enable()
    for name in ("jit_runs-1-cache", "jit_other-1-cache"):
        (folder / name).write_bytes(b"cut short")
    assert compile_cache.repair(text)
    assert [path.name for path in folder.iterdir()] == ["jit_other-1-cache"]
    assert not compile_cache.repair("overflow encountered in exp")
    jax.config.update("jax_compilation_cache_dir", "/the/user's/own")
    assert not compile_cache.repair(text)
