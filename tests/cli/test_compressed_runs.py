"""Compressed runs from the command line: what is counted and stored, what may resume, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl

TOP_K = ["--compress", "top-k:share=0.05"]


def records(folder: Path, method: str, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r for r in lines if (r["method"], r["kind"]) == (method, kind)]


@pytest.mark.slow
def test_bits_are_counted_stored_and_shown(capsys, tmp_path):
    folder = tmp_path / "run"
    shown = jaxpfl(capsys, "compare", "local", "fedavg", *SMALL, *TOP_K, "--output", folder)
    assert shown.status == 0, shown.err
    assert "fedavg: uploads compressed by top-k:share=0.05, " in " ".join(shown.out.split())
    methods = json.loads((folder / "summary.json").read_text())["methods"]
    fedavg, entries, uploads, runs = methods["fedavg"], 650, 4 * 3, 2
    assert fedavg["bytes_up_uncoded"] == 4 * entries * uploads
    assert fedavg["compress"] == "top-k:share=0.05"
    assert methods["local"]["bytes_up"] == 0
    assert "compress" not in methods["local"]
    rounds = records(folder, "fedavg", "round")
    each = np.array([r["upload_bits"] for r in rounds])
    np.testing.assert_array_equal([r["bits_up"] for r in rounds], np.cumsum(each, axis=0))
    assert fedavg["bytes_up"] == each.sum() // (8 * runs)
    # Of each of three messages 32 numbers (a twentieth, rounded), and for where they stand at least a bit each.
    assert (each > 3 * 32 * (32 + 1)).all()
    assert (each < 3 * 32 * (32 + 15)).all()
    assert [r["bits_up"] for r in records(folder, "fedavg", "evaluation")] == [
        rounds[1]["bits_up"],
        rounds[3]["bits_up"],
    ]
    with np.load(folder / "clients.npz") as clients:
        np.testing.assert_array_equal(clients["fedavg/upload_bits"].sum(axis=1), each.sum(axis=0))
        assert "local/upload_bits" not in clients
    for plot in ("accuracy-by-bytes", "loss-by-bytes"):
        assert (folder / "plots" / f"{plot}.png").stat().st_size > 5000
