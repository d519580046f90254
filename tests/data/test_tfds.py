"""Sets of tensorflow-datasets: one written here record by record, and TFDS's own mock of it. No TensorFlow."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpfl.data import load
from jaxpfl.support.errors import JaxpflError

tfds = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")  # TFDS asks for it on Linux alone

SIZES = {"train": 9, "test": 4}


def image(i: int, side: int = 4) -> np.ndarray:
    return np.full((side, side, 3), 20 * i, np.uint8)


def write_set(
    root: Path,
    sizes: dict[str, int] = SIZES,
    features: dict[str, Any] | None = None,
    file_format: str = "array_record",
    ragged: bool = False,
) -> Path:
    """Write what ``tfds build tiny_images --file_format=array_record`` does: metadata and tf.train.Example records."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    folder = root / "tiny_images" / "1.0.0"
    folder.mkdir(parents=True)
    shape = (None, None, 3) if ragged else (4, 4, 3)
    known = {"picture": tfds.features.Image(shape=shape), "kind": tfds.features.ClassLabel(num_classes=5)}
    tfds.features.FeaturesDict(known if features is None else features).save_config(str(folder))
    splits = []
    for split, n in sizes.items():
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        splits.append({"name": split, "shardLengths": [str(n)], "numBytes": "1", "filepathTemplate": template})
        writer = ArrayRecordWriter(str(folder / f"tiny_images-{split}.{file_format}-00000-of-00001"), "group_size:1")
        for i in range(n):
            png = io.BytesIO()
            Image.fromarray(image(i, 4 + i * ragged)).save(png, "png")
            example = tf_example_pb2.Example()
            example.features.feature["picture"].bytes_list.value.append(png.getvalue())
            example.features.feature["kind"].int64_list.value.append(i % 5)
            writer.write(example.SerializeToString())
        writer.close()
    info = {"name": "tiny_images", "version": "1.0.0", "fileFormat": file_format, "splits": splits}
    info["supervisedKeys"] = {"tuple": {"items": [{"featureKey": "picture"}, {"featureKey": "kind"}]}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize("name", ["tfds:tiny_images", "tfds:tiny_images:1.0.0"])
def test_a_prepared_set(tmp_path: Path, name: str) -> None:
    write_set(tmp_path)
    source = load(name, str(tmp_path), standardize=False)
    assert (source.name, source.num_classes, source.inputs) == (name, 5, "pixels")
    expected = (np.stack([image(i) for i in range(9)]) / 255).astype(np.float32)
    np.testing.assert_array_equal(source.x_train, expected)
    np.testing.assert_array_equal(source.y_train, np.arange(9) % 5)
    np.testing.assert_array_equal(source.x_test, expected[:4])
    np.testing.assert_array_equal(source.y_test, np.arange(4))
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": {"test": 3}}, r"no split 'train' \(it has test\)"),
        ({"ragged": True}, "train: all images must have the same size, got 9 sizes"),
        ({"features": {"picture": tfds.features.Image(shape=(4, 4, 3))}}, "must have an image and a class label"),
        ({"features": {"kind": tfds.features.ClassLabel(num_classes=5)}}, "its features are kind"),
        ({"file_format": "tfrecord"}, r"without random access: remove that folder and prepare it .*array_record"),
    ],
)
def test_sets_that_cannot_be_used(tmp_path: Path, arguments: dict, message: str) -> None:
    write_set(tmp_path, **arguments)
    with pytest.raises(JaxpflError, match=message) as error:
        load("tfds:tiny_images", str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_damaged_file(tmp_path: Path) -> None:
    folder = write_set(tmp_path)
    file = folder / "tiny_images-train.array_record-00000-of-00001"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(JaxpflError, match=r"cannot read tfds:tiny_images, train: |tfds:tiny_images: ") as error:
        load("tfds:tiny_images", str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("place", "name"),
    [("top", "data.evil.Image"), ("inner", "evil.Image"), ("older", "tensorflow_datasets_evil.Image")],
)
def test_a_class_that_a_set_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    (tmp_path / "data").mkdir()
    for module in ("data/evil", "evil", "tensorflow_datasets_evil"):
        (tmp_path / f"{module}.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = write_set(tmp_path) / "features.json"
    described = json.loads(file.read_text())
    (described if place == "top" else described["featuresDict"]["features"]["picture"])["pythonClassName"] = name
    file.write_text(json.dumps({"type": name, "content": {}} if place == "older" else described))
    with pytest.raises(JaxpflError, match=f"its features name '{name}', which is not a class of tensorflow-datasets"):
        load("tfds:tiny_images", str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_an_unknown_name_and_a_set_that_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "own"))
    with pytest.raises(JaxpflError, match="unknown tensorflow-datasets set 'mnits': did you mean 'mnist'") as error:
        load("tfds:mnits", str(tmp_path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
    with pytest.raises(JaxpflError, match=r"tfds:mnist is prepared neither in .*: prepare it .*: tfds build") as error:
        load("tfds:mnist", str(tmp_path))
    assert f"--data_dir={tmp_path}" in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())  # nothing is downloaded, and no folder made
    for name in ("huggingface:mnist", "mnist/a=1", "../mnist", "mnist/a/b/c"):
        with pytest.raises(JaxpflError, match="must be tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:VERSION"):
            load(f"tfds:{name}", str(tmp_path))
    with pytest.raises(JaxpflError, match="tfds:mnist/none: "):
        load("tfds:mnist/none", str(tmp_path))
