"""Image sets of tensorflow-datasets, ``tfds:NAME``, read with random access and without TensorFlow.

Nothing is downloaded: a set must have been prepared before, on this or another machine. TFDS's own command, which needs
TensorFlow, prepares a set in a format with random access::

    tfds build NAME --file_format=array_record --data_dir=DIR

DIR is jaxpfl's data directory (``--data-dir`` or ``$JAXPFL_DATA_DIR``), or TFDS's own directory
(``~/tensorflow_datasets`` or ``$TFDS_DATA_DIR``). See https://www.tensorflow.org/datasets/tfless_tfds.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.data.sources.base import Entry, Source, one_line, pixels
from jaxpfl.support.errors import JaxpflError, listed, shown, unknown_name
from jaxpfl.support.files import check_fits

_NAME = re.compile(r"(?P<set>\w+)(/[\w.+-]+)?(:\d+\.[\d*]+\.[\d*]+)?")
_TEST_SPLITS = ("test", "validation")


def load_tfds(name: str, root: Path) -> Source:
    """Load a set of tensorflow-datasets, with its split ``test`` (else ``validation``) as the official test set.

    Args:
      name: ``SET``, ``SET/CONFIG`` or ``SET:VERSION``, as TFDS writes them.
      root: data directory, searched before TFDS's own directory.

    Raises:
      JaxpflError: if tensorflow-datasets is not installed; if the name is unknown (the message suggests the nearest
        name); if the set is not prepared with random access (the message gives the command); if the set has no training
        split; if examples do not have one image and one label each; or if images have different sizes.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise JaxpflError(
            "the data sets tfds:NAME require the package tensorflow-datasets: pip install tensorflow-datasets"
        ) from error
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise JaxpflError(f"the data set must be tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:VERSION, got tfds:{name}")
    with _quiet(), _own_classes(tfds):
        builder = _builder(tfds, name, matched["set"], root)
        try:
            image, label, classes = _features(tfds, name, builder.info)
            splits = list(builder.info.splits)
        except JaxpflError:
            raise
        except Exception as error:  # TFDS raises many types of errors for a damaged description
            raise JaxpflError(f"tfds:{name}: {one_line(error)}") from error
        if "train" not in splits:
            raise JaxpflError(f"tfds:{name}: no split 'train' (it has {listed(splits, 'train')})")
        test = next((split for split in _TEST_SPLITS if split in splits), None)
        parts = {
            split: _read(builder, name, root, split, (image, label)) for split in ("train", test) if split is not None
        }
    x_train, y_train = parts["train"]
    x_test, y_test = parts[test] if test is not None else (None, None)
    x_train, x_test = pixels(x_train), None if x_test is None else pixels(x_test)
    description = f"{builder.info.full_name} of tensorflow-datasets"
    return Source(f"tfds:{name}", x_train, y_train, x_test, y_test, classes, description, inputs="pixels")


def tfds_entry() -> Entry:
    """Return the line of ``jaxpfl data list`` for all sets of tensorflow-datasets."""
    present = importlib.util.find_spec("tensorflow_datasets") is not None
    lacking = "" if present else ": pip install tensorflow-datasets"
    return Entry("tfds:NAME", present, f"any prepared image set of tensorflow-datasets{lacking}")


def _builder(tfds: Any, name: str, base: str, root: Path) -> Any:
    """Return TFDS's builder for a set that was prepared in the data directory or, failing that, in TFDS's directory."""
    builder = None
    for place in (str(root), None):
        try:
            builder = tfds.builder(name, data_dir=place)
        except tfds.core.DatasetNotFoundError:
            continue
        except Exception as error:  # TFDS raises many types for unknown configs or versions, and damaged folders
            raise JaxpflError(f"tfds:{name}: {one_line(error)}") from error
        if builder.is_prepared():
            return builder
    if builder is None:
        raise unknown_name("tensorflow-datasets set", base, tfds.list_builders(with_community_datasets=False))
    raise JaxpflError(
        f"tfds:{name} is prepared neither in {root} nor in {Path(builder.data_dir)}: {_how_to_prepare(name, root)}"
    )


def _how_to_prepare(name: str, root: Path) -> str:
    return f"prepare it (with TensorFlow installed): tfds build {name} --file_format=array_record --data_dir={root}"


def _features(tfds: Any, name: str, info: Any) -> tuple[str, str, int]:
    """Return the names of the features that hold the image and the label, and the number of classes."""
    features = dict(info.features)
    images = [key for key, kind in features.items() if isinstance(kind, tfds.features.Image)]
    labels = [key for key, kind in features.items() if isinstance(kind, tfds.features.ClassLabel)]
    wanted = info.supervised_keys or ()
    image = next((key for key in wanted if key in images), images[0] if images else None)
    label = next((key for key in wanted if key in labels), labels[0] if labels else None)
    if image is None or label is None:
        raise JaxpflError(
            f"tfds:{name} must have an image and a class label, but its features are {listed(features, 'image')}"
        )
    return image, label, int(features[label].num_classes)


def _read(builder: Any, name: str, root: Path, split: str, keys: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Read one split: images [N, H, W, channels] uint8 and labels [N] int32."""
    image, label = keys
    whose = f"tfds:{name}, {split}"
    try:
        records = builder.as_data_source(split=split)
    except NotImplementedError:
        raise JaxpflError(
            f"{whose} is prepared in {builder.data_dir}, but in a format without random access: "
            f"remove that folder and {_how_to_prepare(name, root)}"
        ) from None
    images, labels = [], []
    try:
        for record in (records[i] for i in range(len(records))):
            images.append(np.asarray(record[image]))
            labels.append(int(record[label]))
            if len(images) == 1:  # memory for all images as bytes, stacked, as floats, and standardized
                check_fits(whose, 10 * images[0].nbytes * len(records))
    except JaxpflError:
        raise
    except Exception as error:  # array_record, protobuf and Pillow raise many types for a damaged record
        raise JaxpflError(f"cannot read {whose}: {one_line(error)}") from error
    shapes = {array.shape for array in images}
    if len(shapes) != 1:
        raise JaxpflError(f"{whose}: all images must have the same size, got {len(shapes)} sizes")
    if images[0].dtype != np.uint8:
        raise JaxpflError(f"{whose}: pixels must be uint8, got {images[0].dtype}")
    if min(labels) < 0:
        raise JaxpflError(f"{whose}: its labels are negative, which means that they are hidden: use another set")
    return np.stack(images), np.array(labels, np.int32)


@contextmanager
def _own_classes(tfds: Any) -> Iterator[None]:
    """Allow only TFDS's own classes, because TFDS would import any module that a set's ``features.json`` names."""
    connector = tfds.features.FeatureConnector
    found = connector.__dict__["cls_from_name"]

    def own(cls: Any, name: str) -> Any:
        if not name.startswith("tensorflow_datasets."):
            raise ValueError(f"its features name {shown(name)}, which is not a class of tensorflow-datasets")
        return found.__func__(cls, name)

    connector.cls_from_name = classmethod(own)
    try:
        yield
    finally:
        connector.cls_from_name = found


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress TFDS's log messages about OpenCV and about irrelevant folders."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
