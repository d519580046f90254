"""Files and folders that appear when they are whole, and not where another folder has taken the place of theirs."""

import shutil
from pathlib import Path

import pytest

from jaxpfl.partial import partial


def test_they_appear_at_the_end_and_not_after_an_error(tmp_path: Path):
    with partial(tmp_path / "new") as place:
        place.mkdir()
        (place / "file").write_text("whole")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "whole"
    with pytest.raises(ValueError, match="bad"), partial(tmp_path / "other") as place:
        place.write_text("half")
        raise ValueError("bad")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_folder_that_is_taken_away_meanwhile_is_not_replaced_by_half_of_it(tmp_path: Path, is_moved: bool):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="moved or removed meanwhile"), partial(folder / "new") as place:
        place.mkdir()
        (place / "first").write_text("1")
        folder.rename(tmp_path / "gone") if is_moved else shutil.rmtree(folder)
        place.mkdir(parents=True)
        (place / "second").write_text("2")
    assert not (folder / "new").exists()


def test_a_folder_that_is_not_there_yet_is_no_obstacle(tmp_path: Path):
    with partial(tmp_path / "folder" / "new") as place:
        place.mkdir(parents=True)
    assert (tmp_path / "folder" / "new").is_dir()
