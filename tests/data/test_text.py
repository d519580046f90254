"""Texts of one's own: windows that share nothing, what is held out of them, and files that are no text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpfl
from jaxpfl.data import describe, format_description, load, summary
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

T = 4


def written(folder: Path, texts: dict[str, bytes]) -> str:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return f"text:{folder}"


def numbered(n: int, start: int = 0) -> bytes:
    """Bytes that all differ, and say where they are."""
    return bytes(range(start, start + n))


def test_files_and_subfolders_are_clients_whose_windows_share_no_byte(tmp_path):
    texts = {"b.txt": numbered(23), "a/2.txt": b"yz", "a/1/x.txt": b"uvwx", "a/.hidden": b"?", ".git/x": b"?"}
    texts["a/__pycache__/m.pyc"] = b"\xff\xfe"
    source = load(written(tmp_path, texts), window=T)
    assert source.user_names is not None
    assert source.user_names.tolist() == ["a", "b.txt"]
    assert source.users_train is not None
    assert source.users_train.tolist() == [0] + 4 * [1]
    assert (source.x_train.dtype, source.y_train.dtype, source.num_classes) == (np.int32, np.int32, 256)
    assert (source.task, source.inputs, source.x_test) == ("next-token", "tokens", None)
    whole = np.concatenate([source.x_train, source.y_train[:, -1:]], axis=1)
    assert bytes(whole[0].tolist()) == b"uvwxy"  # in the order of the paths; the tail is left out
    np.testing.assert_array_equal(whole[1:].reshape(-1), np.arange(20))
    np.testing.assert_array_equal(source.x_train[:, 1:], source.y_train[:, :-1])


def test_test_and_validation_windows_are_the_last_of_each_client(tmp_path):
    name = written(tmp_path, {"a": numbered(50), "b": numbered(75, 50)})
    federation = jaxpfl.federate(load(name, window=T), partition="natural", test_share=0.3, validation_share=0.25)
    for client in range(2):
        train, validation, test = (
            np.concatenate([part.x[client], part.y[client]], axis=1)[: part.size[client]]
            for part in (federation.train, federation.validation, federation.test)
        )
        assert len(test) == int(0.3 * (10 + 5 * client) + 0.5)
        assert train.max() < validation.min() <= validation.max() < test.min()
        assert len(train) + len(validation) + len(test) == 10 + 5 * client


def test_tokens_with_a_label_are_counted_not_averaged():
    y = np.array([[1, 2, -1], [-1, -1, -1], [200, -1, -1]])
    parts = [(np.zeros((n, 3), np.int32), y[:n]) for n in (3, 1)]
    federation = jaxpfl.stack_clients(parts, test=parts[::-1])
    described = describe(summary(federation, 201, task="next-token"))
    assert described["tokens"] == {"train": 5, "validation": 0, "test": 5}
    assert [one["tokens"]["train"] for one in described["per_client"]] == [3, 2]
    assert described["tokens_per_client"]["test"] == {"min": 2, "median": 2.5, "max": 3}
    text = format_description(described)
    assert "2 clients, 10 tokens with a label, inputs 3" in text
    assert "mean" not in text
    assert "class_counts" not in described["per_client"][0]


def test_the_last_windows_of_each_user_of_a_client_are_held_out(tmp_path):
    name = written(tmp_path, {"a": numbered(50), "b": numbered(45, 50), "c": numbered(5, 95), "d": numbered(25, 100)})
    source = load(name, window=T)
    split: dict[str, Any] = {"partition": "natural", "users_per_client": 2, "test_share": 0.3, "validation_share": 0.25}
    federation = jaxpfl.federate(source, **split)
    starts = [0, 50, 95, 100, 128]
    found = []
    for client in range(2):
        parts = [
            part.x[client][: part.size[client]] for part in (federation.train, federation.validation, federation.test)
        ]
        for low, high in zip(starts[2 * client :], starts[2 * client + 1 : 2 * client + 3], strict=False):
            train, validation, test = (part[(part[:, 0] >= low) & (part[:, 0] < high)] for part in parts)
            found.append((len(train), len(validation), len(test)))
            if len(test):
                assert train.max() < validation.min() <= validation.max() < test.min()
    # 0.3 of 10 and 9 windows are 3 and 2.7, then 0.25 of 7 and 6; of 1 and 5 they are 0.3 and 1.5, then 0.25 and 0.75.
    assert found == [(5, 2, 3), (5, 1, 3), (1, 0, 0), (2, 1, 2)]


def test_clients_without_text_are_left_out_and_said(tmp_path):
    name = written(tmp_path, {"a/x": b"", "a/y": b"", "b": b"long enough"})
    with pytest.warns(JaxpflWarning, match=r"left out 1 clients without examples \(a\)"):
        source = load(name, window=T)
    assert source.user_names is not None
    assert source.user_names.tolist() == ["b"]
    (tmp_path / "b").write_bytes(b"")
    with pytest.warns(JaxpflWarning, match="left out 2"), pytest.raises(JaxpflError, match="holds no text"):
        load(name, window=T)
