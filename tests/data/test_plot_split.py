"""The picture of a split, for few and many clients and classes; and the text of many classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_files import source_of

from jaxpfl.data import Summary, describe, federate, format_description, plot_split, summary
from jaxpfl.data.plot import _by_class
from jaxpfl.support.errors import JaxpflError


def counts_of(m: int, num_classes: int, **options: object) -> Summary:
    labels = np.random.default_rng(0).integers(num_classes, size=12 * m + num_classes)
    arguments = {"partition": "dirichlet", "alpha": 0.3, "clients": m, **options}
    return summary(federate(source_of(labels), **arguments), num_classes)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "num_classes"), [(1, 2), (10, 10), (59, 40), (300, 10), (1000, 150)])
def test_sizes_of_splits(tmp_path: Path, m: int, num_classes: int) -> None:
    image = pytest.importorskip("PIL.Image")
    path = plot_split(counts_of(m, num_classes, validation_share=0.2), tmp_path / "new" / "split.png")
    assert path == tmp_path / "new" / "split.png"
    assert [file.name for file in path.parent.iterdir()] == ["split.png"]
    with image.open(path) as picture:
        assert (picture.format, picture.width) == ("PNG", 1500)
        assert 500 < picture.height < 1300
        assert len(picture.convert("RGB").getcolors(2**20)) > 50


def test_equal_clients_and_empty_cells(tmp_path: Path) -> None:
    plot_split(counts_of(4, 3, partition="shards", alpha=None, test_share=0.0), tmp_path / "a.png", title="Shards")


def test_many_clients_are_sorted_by_their_most_frequent_class() -> None:
    table = np.array([[0, 3, 1], [5, 0, 0], [0, 4, 0], [2, 1, 0], [0, 0, 0]])
    assert _by_class(table).tolist() == [1, 3, 4, 2, 0]


@pytest.mark.slow
def test_a_file_that_cannot_be_written_and_no_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JaxpflError, match=r"cannot write to .*file/a.png"):
        plot_split(counts_of(3, 2), tmp_path / "file" / "a.png")
    (tmp_path / "folder").mkdir()
    with pytest.raises(JaxpflError, match=r"cannot write to .*folder: it is a folder"):
        plot_split(counts_of(3, 2), tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}  # nothing half-written beside them
    script = """
import sys
sys.modules["matplotlib"] = None
import numpy as np, pytest
from jaxpfl import JaxpflError, data, stack_clients
counts = data.summary(stack_clients([(np.zeros((3, 1)), np.arange(3))]), 3)
with pytest.raises(JaxpflError, match="pip install matplotlib"):
    data.plot_split(counts, "a.png")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, cwd=tmp_path)


def test_a_table_of_many_classes_counts_them() -> None:
    text = format_description(describe(counts_of(5, 30)), most_clients=2)
    assert "training examples by class" not in text
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("client"))
    assert head.split() == ["client", "train", "classes"]
    assert lines[lines.index(head) + 3] == "... and 3 more clients"
