"""Claims on work in a shared folder: one holder at a time, and none that a dead worker keeps."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxpfl.runs.sweep import claims as module
from jaxpfl.runs.sweep import processes
from jaxpfl.runs.sweep.claims import Claims
from jaxpfl.support.errors import JaxpflError, UnwritableError

LEASE = 60.0
HOLD = """
import sys, time
from pathlib import Path
from jaxpfl.runs.sweep.claims import Claims
claim = Claims(Path(sys.argv[1]), "other", lease=float(sys.argv[2])).take("g")
print("held" if claim else "refused", flush=True)
sys.stdin.readline()
print("lost" if claim.is_lost else "kept", flush=True)
"""
on_linux = pytest.mark.skipif(not processes.machine(), reason="dead processes are known at once on Linux only")


class Clock:
    """Monotonic seconds that move when they are told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def held_elsewhere(folder: Path, **changes: object) -> Path:
    """The file of a claim that a process of another machine holds."""
    folder.mkdir(exist_ok=True)
    holder = {"worker": "far", "host": "far", "machine": "far boot pid:[1]", "pid": 1, "started": 1, "beat": 1}
    path = folder / "g.0.claim"
    path.write_text(json.dumps(holder | {"ended": False} | changes))
    return path


def watch(claims: Claims, clock: Clock, seconds: float, step: float = 5.0) -> module.Claim | None:
    """Try to take the work for so long, and give the claim or None."""
    for _ in range(round(seconds / step)):
        if claim := claims.take("g"):
            return claim
        clock.now += step
    return None


def holder(folder: Path, lease: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(lease)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_claim_excludes_others_until_it_ends(tmp_path: Path):
    mine, theirs = Claims(tmp_path / "claims", "a"), Claims(tmp_path / "claims", "b")
    with mine.take("g") as claim:
        assert theirs.take("g") is None
        assert mine.take("g") is None
        assert theirs.holder("g").worker == "a"
        with theirs.take("other"):
            assert not claim.is_lost
    claim.end()  # once more does nothing
    assert claim.is_lost is False
    with theirs.take("g") as second:
        assert claim.is_lost
        assert not second.is_lost
    assert theirs.tries("g") == 2


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_want_it_one_wins(tmp_path: Path, stale: bool):
    """Everybody has watched the same stale claim for the lease, and then tries in the same moment."""
    clock = Clock()
    waiters = [Claims(tmp_path / "claims", f"w{i}", clock=clock) for i in range(16)]
    if stale:
        held_elsewhere(tmp_path / "claims")
        for _ in range(12):
            assert not any(waiter.take("g") for waiter in waiters)
            clock.now += LEASE / 12
    barrier = threading.Barrier(len(waiters))

    def race(waiter: Claims) -> module.Claim | None:
        barrier.wait()
        return waiter.take("g")

    with ThreadPoolExecutor(len(waiters)) as pool:
        won = [claim for claim in pool.map(race, waiters) if claim is not None]
    assert len(won) == 1
    assert all(waiter.take("g") is None for waiter in waiters)
    won[0].end()


def test_of_two_processes_one_wins_each_of_many(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from jaxpfl.runs.sweep.claims import Claims\n"
        "claims = Claims(Path(sys.argv[1]), sys.argv[2]); input()\n"
        "held = [c for i in range(200) if (c := claims.take(f'g{i}'))]; print(*(c.name for c in held)); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "claims")]
    racers = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    won = [racer.stdout.readline().split() for racer in racers]
    for racer in racers:
        racer.communicate("\n")
    assert sorted(won[0] + won[1]) == sorted(f"g{i}" for i in range(200))


def test_a_claim_that_shows_no_life_for_the_lease_is_taken_over(tmp_path: Path):
    held_elsewhere(tmp_path)
    clock = Clock()
    claims = Claims(tmp_path, "b", clock=clock)
    assert watch(claims, clock, LEASE) is None
    with watch(claims, clock, 10) as claim:
        assert clock.now == 1000 + LEASE
        assert not claim.is_lost


def test_a_claim_that_shows_life_is_left(tmp_path: Path):
    clock = Clock()
    claims = Claims(tmp_path, "b", clock=clock)
    for beat in range(10):
        held_elsewhere(tmp_path, beat=beat)
        assert watch(claims, clock, LEASE - 5) is None


def test_a_watcher_that_was_suspended_has_watched_nothing(tmp_path: Path):
    """A machine that sleeps suspends holder and watcher together: who wakes first must not rob the other."""
    held_elsewhere(tmp_path)
    clock = Clock()
    claims = Claims(tmp_path, "b", clock=clock)
    assert claims.take("g") is None
    clock.now += 3600
    assert claims.take("g") is None
    held_elsewhere(tmp_path, beat=2)
    assert watch(claims, clock, LEASE) is None


def test_the_time_of_day_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = held_elsewhere(tmp_path)
    clock = Clock()
    claims = Claims(tmp_path, "b", clock=clock)
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, lambda: pytest.fail("the wall clock was read"))
    for jump in (-86400 * 365, 86400 * 365):  # of the clock of the file server
        os.utime(path, (1.7e9 + jump, 1.7e9 + jump))
        assert claims.take("g") is None
    with watch(claims, clock, LEASE + 5):
        assert clock.now == 1000 + LEASE


@pytest.mark.parametrize(
    "contents",
    [b"", b"\xff\xfe\0", b"[" * 4096, b"{}", b"null", b'{"pid": -1}', b"x" * 10_000, "folder", "link"],
    ids=["empty", "bytes", "nested", "fields", "null", "pid", "long", "folder", "link"],
)
def test_a_claim_that_cannot_be_read_holds_for_the_lease(tmp_path: Path, contents: bytes | str):
    path = tmp_path / "g.0.claim"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    clock = Clock()
    claims = Claims(tmp_path, "b", clock=clock)
    assert claims.holder("g") is None
    assert watch(claims, clock, LEASE) is None
    with watch(claims, clock, 10):
        assert claims.holder("g").worker == "b"


@pytest.mark.parametrize(
    "field", [{"pid": 0}, {"pid": -1}, {"pid": "1"}, {"started": "1"}, {"ended": 1}, {"beat": None}, {"worker": 3}]
)
@on_linux
def test_a_claim_with_a_wrong_field_names_no_holder(tmp_path: Path, field: dict[str, object]):
    held_elsewhere(tmp_path, machine=processes.machine(), **field)
    claims = Claims(tmp_path, "b", clock=Clock())
    assert claims.holder("g") is None
    assert claims.take("g") is None


@on_linux
@pytest.mark.parametrize("pid", [2**22 + 1, 2**70])
def test_a_number_that_no_process_has_is_a_dead_one(tmp_path: Path, pid: int):
    held_elsewhere(tmp_path, machine=processes.machine(), pid=pid)
    with Claims(tmp_path, "b", clock=Clock()).take("g") as claim:
        assert claim.name == "g"


@on_linux
def test_a_number_that_another_process_has_now_is_a_dead_one(tmp_path: Path):
    mine = {"machine": processes.machine(), "pid": os.getpid()}
    start = processes.started(os.getpid())
    assert start is not None
    held_elsewhere(tmp_path, **mine, started=start)
    claims = Claims(tmp_path, "b", clock=Clock())
    assert claims.take("g") is None
    held_elsewhere(tmp_path, **mine, started=start - 1)
    with claims.take("g") as claim:
        assert claim.name == "g"


def test_another_machines_number_says_nothing_and_its_end_is_believed(tmp_path: Path):
    claims = Claims(tmp_path, "b", clock=Clock())
    held_elsewhere(tmp_path, pid=2**22 + 1)
    assert claims.take("g") is None
    held_elsewhere(tmp_path, machine="")
    assert claims.take("g") is None
    held_elsewhere(tmp_path, ended=True)
    with claims.take("g") as claim:
        assert claim.name == "g"


@on_linux
def test_a_killed_holder_is_known_at_once(tmp_path: Path):
    process = holder(tmp_path, LEASE)
    claims = Claims(tmp_path, "b")
    assert claims.take("g") is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until it is waited for
    with claims.take("g") as claim:
        assert claims.holder("g").worker == "b"
        assert not claim.is_lost
    process.communicate()


@pytest.mark.slow
def test_a_holder_that_is_suspended_for_longer_than_the_lease_finds_its_claim_lost(tmp_path: Path):
    lease = 4.0  # a busy machine may hold up a sign of life for a second
    process = holder(tmp_path, lease)
    claims = Claims(tmp_path, "b", lease=lease)
    until = time.monotonic() + 1.5 * lease
    while time.monotonic() < until:  # it shows signs of life
        assert claims.take("g") is None
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    while (claim := claims.take("g")) is None:
        assert time.monotonic() < stopped + 60
        time.sleep(0.05)
    assert time.monotonic() > stopped + 0.5 * lease  # the last sign of life may be up to a sixth of it old
    process.send_signal(signal.SIGCONT)
    before = claims.holder("g")
    assert process.communicate("\n")[0] == "lost\n"  # and its signs of life touched nothing of the new holder's
    assert before.worker == "b"
    assert claims.holder("g").worker == "b"
    assert not claim.is_lost
    claim.end()


def test_a_sign_of_life_after_the_end_is_none(tmp_path: Path):
    claims = Claims(tmp_path, "a")
    claim = claims.take("g")
    claim.end()
    claim.beat()
    assert claims.holder("g").ended


def test_a_disk_that_fails_meanwhile_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    claims = Claims(tmp_path, "a", lease=0.06)
    with claims.take("g") as claim:
        failed = threading.Event()

        def fail(descriptor: int) -> None:
            failed.set()
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", fail)
            assert failed.wait(30)
        beat = claims.holder("g").beat
        until = time.monotonic() + 30
        while claims.holder("g").beat == beat:  # it goes on
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not claim.is_lost


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../a"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str):
    with pytest.raises(JaxpflError, match=r"a claim needs a name .*, got '"):
        Claims(tmp_path, "a").take(name)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "claims"):
        with pytest.raises(UnwritableError, match=f"cannot write to {folder}: "):
            Claims(folder, "a").take("g")


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="there is no folder in which nobody may write")
def test_a_read_only_folder_is_told():
    with pytest.raises(UnwritableError, match="cannot write to /proc/self/fdinfo"):
        Claims(Path("/proc/self/fdinfo"), "a").take("g")


def test_a_full_disk_is_told_and_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", fail)
        with pytest.raises(UnwritableError, match=r"g\.0\.claim: No space left on device"):
            Claims(tmp_path, "a").take("g")
    with Claims(tmp_path, "b").take("g") as claim:
        assert claim.name == "g"
