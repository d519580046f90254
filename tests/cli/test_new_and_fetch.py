"""``jaxpfl new``, whose project works as it stands, and ``jaxpfl data fetch``, without a network."""

import errno
import hashlib
import io
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from command import jaxpfl
from forks import Forked, script

from jaxpfl.data.sources import download


@pytest.mark.slow
def test_a_new_project_is_run_and_a_folder_with_files_is_refused(capsys, tmp_path, monkeypatch):
    made = jaxpfl(capsys, "new", tmp_path / "a" / "project")
    assert (made.status, made.out.count("\n")) == (0, 1)
    monkeypatch.chdir(tmp_path / "a" / "project")
    assert {path.name for path in Path().iterdir()} == {
        *("method.py", "data.py", "config.toml", "test_method.py", "README.md")
    }
    small = ["--rounds", "2", "--local-steps", "2", "--seeds", "1", "--json"]
    found = jaxpfl(capsys, "run", "--config", "config.toml", *small, "--output", "run")
    assert (found.status, list(found.json["methods"])) == (0, ["mine"]), found.err
    refused = jaxpfl(capsys, "new", tmp_path / "a")
    assert (refused.status, refused.err) == (2, f"error: {tmp_path / 'a'} is not an empty folder: choose another\n")


def test_a_new_project_is_whole_or_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = jaxpfl(capsys, "new", ".")  # its rename would take the folder away from the user's shell
    assert (refused.status, refused.err) == (2, "error: . is the current folder: choose another\n")

    def fill(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(Path, "write_bytes", fill)
    refused = jaxpfl(capsys, "new", "project")
    assert (refused.status, refused.err) == (2, "error: cannot write to project: disk full\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_tests_of_a_new_project_pass_and_its_data_are_a_federation(capsys, monkeypatch, tmp_path):
    assert jaxpfl(capsys, "new", tmp_path).status == 0
    monkeypatch.chdir(tmp_path)
    tests = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    for code in (tests, script(tmp_path / "data.py")):
        process = Forked(code=code)
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    described = jaxpfl(capsys, "data", "describe", "--data", f"federation:{tmp_path / 'clients'}", "--json")
    assert described.json["clients"] == 5


def tar(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return file.getvalue()


TWO = {"one.gz": b"1", "two.gz": b"2"}


@pytest.mark.parametrize(
    ("files", "served", "message"),
    [
        (TWO, TWO, None),
        ({"set.tar.gz": tar("batches")}, {"set.tar.gz": tar("batches")}, None),
        (TWO, {"one.gz": b"1"}, "cannot fetch http://host/two.gz (<urlopen error gone>): "),
        (TWO, TWO | {"two.gz": b"3"}, "http://host/two.gz has the MD5 sum "),
    ],
)
def test_a_set_is_fetched_whole_or_not_at_all(capsys, tmp_path, monkeypatch, files, served, message):
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        if (name := url.rsplit("/", 1)[1]) not in served:
            raise urllib.error.URLError("gone")
        return io.BytesIO(served[name])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    sums = {name: hashlib.md5(text).hexdigest() for name, text in files.items()}
    monkeypatch.setitem(download.REMOTE, "mnist", download._Remote("http://host/", sums))
    found = jaxpfl(capsys, "data", "fetch", "mnist", "--data-dir", tmp_path / "data")
    if message is None:
        assert (found.status, found.out) == (0, f"mnist: {tmp_path / 'data' / 'mnist'}\n"), found.err
        names = ["batches"] if "set.tar.gz" in files else list(files)
        assert sorted(path.name for path in (tmp_path / "data" / "mnist").iterdir()) == names
        again = jaxpfl(capsys, "data", "fetch", "mnist", "--data-dir", tmp_path / "data")
        assert (again.status, "exists already" in again.err) == (2, True)
    else:
        assert (found.status, found.err.count("\n")) == (2, 1)
        assert message in found.err
        assert [*(tmp_path / "data").iterdir()] == []
