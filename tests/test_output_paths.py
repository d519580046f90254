"""Files and folders that appear when they are whole, and not where another folder has taken the place of theirs."""

import shutil
from pathlib import Path

import pytest

from jaxpfl.support.output_paths import partial


def test_they_appear_at_the_end(tmp_path: Path):
    with partial(tmp_path / "new") as place:
        place.mkdir()
        (place / "file").write_text("whole")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "whole"


def test_an_error_leaves_nothing(tmp_path: Path):
    def write() -> None:
        with partial(tmp_path / "other") as place:
            place.write_text("half")
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_folder_that_is_taken_away_meanwhile_is_not_replaced_by_half_of_it(tmp_path: Path, is_moved: bool):
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> None:
        with partial(folder / "new") as place:
            place.mkdir()
            (place / "first").write_text("1")
            folder.rename(tmp_path / "gone") if is_moved else shutil.rmtree(folder)
            place.mkdir(parents=True)
            (place / "second").write_text("2")

    with pytest.raises(FileNotFoundError, match="its folder was moved or removed meanwhile"):
        write()
    assert not (folder / "new").exists()


def test_a_folder_that_is_not_there_yet_is_no_obstacle(tmp_path: Path):
    with partial(tmp_path / "folder" / "new") as place:
        place.mkdir(parents=True)
    assert (tmp_path / "folder" / "new").is_dir()
