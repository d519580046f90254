"""Parts of the soak: its figures of what a process holds, and a command that fails."""

import pytest
from lasting import held, run
from soak import flatness, fresh, known


def test_a_leak_is_a_slope_and_a_full_cache_is_none():
    leak = [{"handles": 8.0, "programs": float(min(i, 10)), "resident": 100 + 0.5 * i} for i in range(40)]
    told = flatness(leak)
    assert told["handles"] == {"first": 8.0, "quarters": [8.0] * 4, "slope": 0.0}
    assert told["resident"]["slope"] == pytest.approx(0.5)
    assert told["resident"]["quarters"] == pytest.approx([102.2, 107.2, 112.2, 117.2], abs=0.1)
    assert told["programs"]["slope"] == 0
    assert told["programs"]["quarters"][0] < told["programs"]["quarters"][-1] == 10


def test_jobs_that_are_known_come_again_and_fresh_ones_do_not():
    again = [known(i) for i in range(48)]
    assert {name for name, *_ in again} == {"run", "disk", "sweep", "study", "compare", "resumed"}
    assert again[:24] == again[24:]
    assert len({tuple(args) for name, args, _ in again if name != "resumed"}) == 20
    new = [tuple(args) for _, args in map(fresh, range(48))]
    assert len(set(new)) == 48


def test_a_command_that_fails_is_told():
    status, said = run(["run", "fedagv"])
    assert status == 2
    assert "did you mean 'fedavg'" in said
    assert held()["handles"] > 2
