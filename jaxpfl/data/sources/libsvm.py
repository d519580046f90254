"""Text files in the LIBSVM format: ``label index:value index:value ...`` (Chang and Lin 2011).

``libsvm:PATH`` reads PATH, relative to the data directory or to its folder ``libsvm``. If there is a file PATH.t, it
becomes the official test set. For example, ``a9a.t`` is the test set of ``a9a``, and the compressed file ``x.t.bz2`` is
the test set of ``x.bz2``. scikit-learn parses the files.

By default, integer labels become the classes 0, 1, ... in the order of their values (-1 / +1 become 0 / 1), and other
labels make the task a regression. For the task multilabel, a line may begin with several labels, ``2,5 index:value
...``, or none. Each distinct label becomes a column of 0 and 1; the columns are in the order of the labels' values.
Inputs become dense float32 arrays (float64 if float32 loses digits), and are not scaled.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from jaxpfl.data.labels import check_finite, checked_labels, digit_loss, narrowed, unlike_numbers
from jaxpfl.data.sources.base import Source, one_line, where_to_put_it
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import check_fits, opened

LIBSVM_SETS = {"a9a": "a9a, income above 50 000 from 123 binary features (Adult)"}
"""Sets known by name."""

_MEMORY = 4  # memory of parsed sparse numbers, relative to the text's length
_MOST_INFLATED = 100  # largest ratio of inflated to compressed text: bzip2 can inflate 15 kB to 3 GB of empty lines
_SHORT = 2**26  # a file may always inflate to this number of bytes
_COMPRESSED = (".gz", ".bz2")


def load_libsvm(name: str, path: str, root: Path, *, task: str | None = None) -> Source:
    """Load a data set from LIBSVM text.

    Args:
      name: name of the data set.
      path: training file, as described in the module's docstring.
      root: data directory.
      task: task of the labels; by default, inferred from their values.

    Raises:
      JaxpflError: if a file is missing; if a line cannot be parsed; if a number is not finite; if labels do not suit
        the task; if the test file has a class that the training file lacks; or if there are too many features for a
        dense array.
    """
    train, test = _locate(name, path, root)
    files = [train] if test is None else [train, test]
    matrices, labels = zip(*_parse(files, task == "multilabel"), strict=True)
    check_fits(train, 12 * sum(matrix.shape[0] for matrix in matrices) * matrices[0].shape[1])
    dense = [np.asarray(matrix.toarray()) for matrix in matrices]
    for file, own in zip(files, dense, strict=True):
        check_finite(own, str(file))
    wide = digit_loss(dense[0]) is not None
    x = [narrowed(own, wide=wide) for own in dense]
    if task is None:
        task = "classification" if all((own == np.round(own)).all() for own in labels) else "regression"
    count, classes = 1, None
    if task == "regression":
        y = [checked_labels(own, str(file)) for file, own in zip(files, labels, strict=True)]
    else:
        several = task == "multilabel"
        classes = _classes(train, np.array([one for own in labels[0] for one in own]) if several else labels[0])
        number = _marks if several else _numbers
        y = [number(own, classes, file) for file, own in zip(files, labels, strict=True)]
        if several or task == "classification":
            count = len(classes)
        elif len(classes) != 2:
            raise JaxpflError(f"{train}: the task {task!r} requires two classes, but the labels have {len(classes)}")
    description = LIBSVM_SETS.get(name) or f"LIBSVM text in {train}"
    source = Source(name, x[0], y[0], None, None, count, description, task=task)
    if test is not None:
        source = source._replace(x_test=x[1], y_test=y[1])
    return source if classes is None else source._replace(class_names=unlike_numbers(classes))


def describe_libsvm(name: str, root: Path) -> str:
    """Describe one of `LIBSVM_SETS`, after locating its files without reading them."""
    return f"{LIBSVM_SETS[name]}: {_locate(name, name, root)[0]}"


def _locate(name: str, path: str, root: Path) -> tuple[Path, Path | None]:
    own = Path(path).expanduser()
    places = [root / own, root / "libsvm" / own]
    train = next((place for place in places if place.is_file()), None)
    if train is None or not path:
        tried = " or ".join(map(str, places))
        raise JaxpflError(f"file {tried} of data set {name!r} not found: {where_to_put_it()}")
    stem, suffix = (train.with_suffix(""), train.suffix) if train.suffix in _COMPRESSED else (train, "")
    test = stem.with_name(f"{stem.name}.t{suffix}")
    return train, test if test.is_file() else None


def _parse(files: list[Path], several: bool) -> list[tuple]:
    """Parse the sparse inputs and the labels of each file; all files get the same number of features.

    If ``several`` is true, the labels of a line are a tuple.
    """
    try:
        from sklearn.datasets import load_svmlight_files
    except ImportError as error:
        raise JaxpflError("LIBSVM files require the package scikit-learn: pip install scikit-learn") from error
    texts = [_text(file) for file in files]
    try:
        flat = load_svmlight_files(texts, dtype=cast(Any, np.float64), multilabel=several)
    except Exception as error:  # scikit-learn's parser and the codecs raise many types of errors
        hint = "" if several else " (if lines have several labels, set task = multilabel)"
        raise JaxpflError(f"{' or '.join(map(str, files))} is not LIBSVM text: {one_line(error)}{hint}") from error
    parts = list(zip(flat[::2], flat[1::2], strict=True))
    for file, (x, _) in zip(files, parts, strict=True):
        if x.shape[0] == 0 or x.shape[1] == 0:
            raise JaxpflError(f"{file}: the file has no examples")
    return parts


def _text(file: Path) -> IO[bytes]:
    """Read a file into memory; inflate a compressed file piece by piece, up to a limit."""
    inflate: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(file.suffix)
    text = io.BytesIO()
    try:
        most = max(_MOST_INFLATED * file.stat().st_size, _SHORT)
        with opened(file) as raw:
            inflated = raw if inflate is None else inflate(raw)
            while piece := inflated.read(2**20):
                text.write(piece)
                if text.tell() > most:
                    raise JaxpflError(f"{file} is not LIBSVM text: it unpacks to over {_MOST_INFLATED} times its size")
                check_fits(file, _MEMORY * text.tell())
    except (OSError, EOFError, zlib.error) as error:
        raise JaxpflError(f"{file} is not LIBSVM text: {one_line(error)}") from error
    text.seek(0)
    return text


def _classes(file: Path, labels: np.ndarray) -> np.ndarray:
    """Return the distinct labels, which must be integers."""
    values = np.unique(labels)
    if not np.isfinite(values).all() or (values != np.round(values)).any():
        wrong = values[~np.isfinite(values) | (values != np.round(values))][0]
        raise JaxpflError(f"{file}: classes must be whole numbers, got the label {wrong:g}")
    return values


def _numbers(labels: np.ndarray, classes: np.ndarray, file: Path) -> np.ndarray:
    """Return the index of each label among the training classes, [n] int32."""
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    if (classes[places] != labels).any():
        raise JaxpflError(f"{file}: label {labels[classes[places] != labels][0]:g} is not among the training labels")
    return places.astype(np.int32)


def _marks(labels: list[tuple[float, ...]], classes: np.ndarray, file: Path) -> np.ndarray:
    """Return 1 for each of K classes that is among a line's labels, else 0: int32 [n, K] for n lines."""
    marks = np.zeros((len(labels), len(classes)), np.int32)
    for row, own in enumerate(labels):
        marks[row, _numbers(np.asarray(own, float), classes, file)] = 1
    return marks
