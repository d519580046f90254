"""A sweep whose test labels are wrong chooses, stops and runs the same settings: nothing of it reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import sweep_of

from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import Record
from jaxpfl.runs.sweep.results import Choice, select
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep

CLASSES = 3


def swept(folder: Path, poisoned: bool, search: dict[str, Any]) -> tuple[list[Record], dict[str, Choice]]:
    """The records and the choices of a sweep over data with the right test labels, or with wrong ones."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(CLASSES, 4))
    labels = draw.integers(CLASSES, size=360)
    x = (centres[labels] + draw.normal(size=(360, 4))).astype(np.float32)
    at_test = (labels[240:] + 1) % CLASSES if poisoned else labels[240:]
    folder.mkdir()
    np.savez(folder / "own.npz", x_train=x[:240], y_train=labels[:240], x_test=x[240:], y_test=at_test)
    given = {"data": "npz:own.npz", "data_dir": str(folder), "partition": "iid"}
    definition = sweep_of("lr=.001,.03,.3", methods=("fedavg",), search=search, **given)
    sweep = Sweep.open(folder / "sweep", definition, resume=False)
    run_missing(sweep, Reporter())
    records = sweep.grid_order(sweep.journal.read())
    return records, select(records, definition.searched)


@pytest.mark.slow
@pytest.mark.parametrize("search", [{"search_seeds": 1}, {"halving": 2, "halving_first": 1}], ids=["seeds", "halving"])
def test_wrong_test_labels_change_test_scores_alone(tmp_path: Path, search: dict[str, Any]):
    clean, chosen = swept(tmp_path / "clean", False, search)
    poisoned, still = swept(tmp_path / "poisoned", True, search)
    assert still == chosen
    assert all(choice.settings is not None for choice in chosen.values())
    same = ("method", "settings", "seed", "status", "rounds")
    assert [[getattr(r, name) for name in same] for r in poisoned] == [[getattr(r, n) for n in same] for r in clean]
    for name in ("validation_accuracy", "validation_loss", "train_loss"):
        assert [r.metrics.get(name) for r in poisoned] == [r.metrics.get(name) for r in clean]
    right, wrong = ([r.metrics["personalized_accuracy"] or 0.0 for r in those] for those in (clean, poisoned))
    assert max(wrong) < max(right) - 0.1
