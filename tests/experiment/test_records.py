"""``metrics.jsonl``: no round twice, a torn end is dropped, and what is no record is one line."""

import json
from pathlib import Path

import pytest

from jaxpfl import JaxpflError
from jaxpfl.support.errors import UnwritableError
from jaxpfl.support.files import Records


def record(round: int, kind: str = "round", method: str = "local", **more) -> dict:
    return {"kind": kind, "method": method, "round": round, "train_loss": [0.5, None]} | more


@pytest.fixture
def records(tmp_path: Path) -> Records:
    records = Records(tmp_path / "metrics.jsonl")
    records.append([record(1), record(2), record(2, "evaluation", seconds=0.5), record(1, method="fedavg")])
    return records


def test_what_is_kept_holds_no_round_twice(records):
    before = records.read()
    records.append([record(2, train_loss=[0.1, 0.2]), record(3)])
    with open(records.path, "a") as file:
        file.write('{"kind": "round", "method": "lo')  # a kill
    records.keep(lambda r: r["method"] != "local" or r["round"] <= 2)
    assert records.read() == [before[0], record(2, train_loss=[0.1, 0.2]), *before[2:]]
    records.append([record(3)])
    assert [r["round"] for r in records.read() if r["kind"] == "round" and r["method"] == "local"] == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[" * 100_000,
        json.dumps(record(3, kind="other")).encode(),
        json.dumps(record("3")).encode(),
        json.dumps(record(3, train_loss=["low", "high"])).encode(),
        json.dumps(record(3, "evaluation", seconds="1")).encode(),
    ],
)
def test_a_line_that_is_no_record_is_named(records, line):
    with open(records.path, "ab") as file:
        file.write(line + b"\n")
    with pytest.raises(
        JaxpflError, match=r"metrics\.jsonl line 5 is damaged: delete the file, and --resume"
    ) as refused:
        records.read()
    assert "\n" not in str(refused.value)


def test_no_file_and_no_place_for_one(tmp_path):
    assert Records(tmp_path / "none").read() == []
    with pytest.raises(JaxpflError, match="cannot read"):
        Records(tmp_path).read()
    with pytest.raises(UnwritableError, match=r"cannot write to .*: Is a directory$"):
        Records(tmp_path).append([record(1)])
