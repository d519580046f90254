"""Download of public data sets for ``jaxpfl data fetch``, the only command that uses a network."""

from __future__ import annotations

import hashlib
import http.client
import io
import tarfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxpfl.data.sources.base import data_directory, one_line
from jaxpfl.support.errors import JaxpflError, unknown_name, writing
from jaxpfl.support.output_paths import partial

_SECONDS = 60


class _Remote(NamedTuple):
    url: str
    files: Mapping[str, str]  # name -> MD5, as torchvision records it


def _idx(url: str, *sums: str) -> _Remote:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return _Remote(url, {f"{name}-ubyte.gz": md5 for name, md5 in zip(names, sums, strict=True)})


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
REMOTE = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        *("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
        *("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        *("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
        *("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "kmnist": _idx(
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        *("bdb82020997e1d708af4cf47b453dcf7", "e144d726b3acfaa3e44228e80efcd344"),
        *("5c965bf0a639b31b8f53240b1b52f4d7", "7320c461ea6c1c855c0b718fb2a4b134"),
    ),
    "cifar10": _Remote(_TORONTO, {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}),
    "cifar100": _Remote(_TORONTO, {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}),
}
"""Data sets that can be fetched."""


def fetch(name: str, data_dir: str | None = None) -> Path:
    """Download all files of a data set into its folder in the data directory, and check their MD5 sums.

    Returns:
      The folder.

    Raises:
      JaxpflError: if there is no download for the name, if the folder exists, if a file cannot be fetched (the message
        says where to put it), or if its checksum is wrong.
    """
    if name not in REMOTE:
        raise unknown_name("downloadable data set", name, REMOTE)
    folder = data_directory(data_dir) / name
    if folder.exists():
        raise JaxpflError(f"{folder} exists already: delete it to fetch {name} again")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial(folder) as place:
            place.mkdir()
            for file, md5 in REMOTE[name].files.items():
                content = _content(REMOTE[name].url + file, md5, folder)
                if file.endswith(".tar.gz"):
                    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                        archive.extractall(place, filter="data")
                else:
                    (place / file).write_bytes(content)
    return folder


def _content(url: str, md5: str, folder: Path) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        said = f"cannot fetch {url} ({one_line(error)})"
        raise JaxpflError(
            f"{said}: fetch it elsewhere, and put it (unpacked, if it is a .tar.gz) in {folder}"
        ) from None
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise JaxpflError(f"{url} has the MD5 sum {found}, not {md5}: nothing was written")
    return content
