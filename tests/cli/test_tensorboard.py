"""``--tensorboard``: event files with the numbers of ``metrics.jsonl``, also of a run that goes on."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl

pytest.importorskip("tensorboardX", reason="the extra jaxpfl[tensorboard] is not installed")
from tensorboardX.proto.event_pb2 import Event

from jaxpfl.runs.tracking import means


def events(folder: Path) -> dict[tuple[str, int], float]:
    """(name, round) -> value of all event files, later files last, as TensorBoard reads them: a restart purges."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == event.session_log.START:
                found = {key: value for key, value in found.items() if key[1] < event.step}
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def recorded(folder: Path, method: str) -> dict[tuple[str, int], float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {
        (f"{row['kind']}/{name}", row["round"]): value
        for row in rows
        if row["method"] == method
        for name, value in means(row).items()
    }


@pytest.mark.slow
def test_the_numbers_are_those_of_the_records(tmp_path: Path, capsys):
    folder = tmp_path / "run"
    command = ["compare", "local", "fedavg", *SMALL, "--output", folder, "--tensorboard"]
    assert jaxpfl(capsys, *command).status == 0
    for rounds in (4, 6):
        if rounds > 4:
            assert jaxpfl(capsys, *command, "--rounds", "6", "--resume").status == 0
        for method in ("local", "fedavg"):
            found, told = events(folder / "tensorboard" / method), recorded(folder, method)
            assert ("evaluation/personalized_accuracy", rounds) in told
            assert ("round/train_loss", 1) in told
            assert found.keys() == told.keys()
            np.testing.assert_allclose([found[key] for key in told], list(told.values()), rtol=1e-6)


def test_means_are_over_the_seeds_that_have_a_number():
    record = {"kind": "round", "method": "m", "round": 3, "loss": [1.0, float("nan"), 3.0], "psi": [float("inf")]}
    assert means(record | {"seconds": 2.5}) == {"loss": 2.0, "seconds": 2.5}
