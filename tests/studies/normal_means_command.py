"""``jaxpfl estimate normal-means`` where it refuses."""

import numpy as np
import pytest

from jaxpfl.cli import main


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line on standard error of a command that ends with status 2, and prints nothing else."""
    with pytest.raises(SystemExit) as stop:
        main(["estimate", "normal-means", *map(str, args)])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def numbered(header: str, *columns: np.ndarray) -> str:
    """Text of a file of clients c0, c1, ..., with these columns."""
    rows = (",".join(map(str, row)) for row in zip(*columns, strict=True))
    return f"id,{header}\n" + "".join(f"c{i},{row}\n" for i, row in enumerate(rows))
