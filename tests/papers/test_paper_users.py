"""Rows whose ± is over users: print's statistic, from each user's scores, which are kept with their data."""

import json
import math
from statistics import mean, stdev

import pytest

from jaxpfl import JaxpflError
from jaxpfl.benchmarks.papers import registry, results, run
from jaxpfl.benchmarks.papers.declared import Contender, Experiment, Printed, Students, Training
from jaxpfl.benchmarks.papers.users import over_users
from jaxpfl.benchmarks.papers.way import Interrupted, Way
from jaxpfl.support import files

TABLE_2 = [85.5, 78.2, 82.2, 82.1, 79.4, 77.1, 75.6, 79.7, 87.7, 91.0]
"""PersFL on CIFAR-10, DS-1: each user's accuracy, a mean over five runs."""
SMALL = {"data": "digits", "model": "linear", "clients": 4, "cohort": 4, "classes_per_client": 3, "local_steps": 2}
SMALL |= {"batch_size": 5, "rounds": 3, "seeds": 2, "validation_share": 0.2}
TRAINING = Training("digits", SMALL, (Contender("fedavg", "FedAvg", Printed(50.0, 1.0)),), spread="clients")
EXPERIMENT = Experiment("users", "a paper", "accuracy", 1, (TRAINING,))


def way(folder, **more):
    return Way(results.place(folder, EXPERIMENT, quick=False), **more)


def test_the_statistic_is_that_of_print():
    shifts = (-2.0, 0.0, 2.0, 1.0, -1.0)
    runs = [[(user + shift * (-1) ** i) / 100 for i, user in enumerate(TABLE_2)] for shift in shifts]
    value, std = over_users(runs)
    assert value == pytest.approx(mean(TABLE_2))
    assert std == pytest.approx(stdev(TABLE_2))
    assert f"{std:.1f}" == "4.9"  # as printed; its divisor of 10 in place of 9 would give 4.7


def test_users_without_test_examples_are_left_out():
    assert over_users([[0.5, None, 0.7], [0.7, None, 0.7]]) == pytest.approx((65.0, math.sqrt(50)))


def test_rows_over_users_score_alone():
    cases = [case for one in registry.EXPERIMENTS.values() for case in one.cases]
    cases = [case.training if isinstance(case, Students) else case for case in cases]
    found = [case for case in cases if isinstance(case, Training) and case.spread == "clients"]
    assert found
    assert all(row.score == "personalized_accuracy" for case in found for row in case.contenders)


@pytest.mark.slow
def test_a_row_over_users_is_run_once_and_of_its_data_alone(tmp_path):
    with pytest.raises(Interrupted):
        run.run(EXPERIMENT, way(tmp_path, stopped=lambda: True))
    (row,) = run.run(EXPERIMENT, way(tmp_path)).rows
    path = tmp_path / "users" / "runs" / "digits-FedAvg" / "users.json"
    stored = files.read_checksummed(path)
    users = [100 * mean(of) for of in zip(*stored["accuracy"], strict=True)]
    assert len(users) == 4
    assert (row.ours, row.std) == pytest.approx((mean(users), stdev(users)))
    assert row.difference == pytest.approx((row.ours - 50) / math.hypot(row.std, 1))
    assert "over users" in row.note
    assert run.run(EXPERIMENT, way(tmp_path, stopped=lambda: True)).rows == (row,)

    files.write_checksummed(path, stored | {"data": stored["data"] + 1})
    with pytest.raises(JaxpflError, match="the data set digits differs from that of"):
        run.run(EXPERIMENT, way(tmp_path))
    files.write_checksummed(path, stored | {"method": "persfl"})
    with pytest.raises(JaxpflError, match="with different settings"):
        run.run(EXPERIMENT, way(tmp_path))
    for text in (json.dumps(stored | {"accuracy": stored["accuracy"][:1], "crc32": "0"}), "[]", "{", '{"a": 1e999}'):
        path.write_text(text)
        with pytest.raises(JaxpflError, match=r"users\.json.*delete the file to run it again"):
            run.run(EXPERIMENT, way(tmp_path))
