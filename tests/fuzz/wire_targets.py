"""Decoders of compressed messages, and parsers of settings that are texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_target import Target, of_file

from jaxpfl.algorithms.parts import augmentation, optimizers, schedules
from jaxpfl.core import participation
from jaxpfl.data.sources import planted
from jaxpfl.models import losses
from jaxpfl.runs.sweep import grid
from jaxpfl.studies import bernoulli
from jaxpfl.uploads.compression import codes, compressors, quantizers
from jaxpfl.uploads.robust import aggregation, attacks

D = 24
"""Entries of the vector that a message is of."""


def vector(rng: random.Random) -> np.ndarray:
    values = rng.choice(([0.0, 1.0], [0.0, -0.0, 1.5, float("nan")], [rng.gauss(0, 1) for _ in range(D)]))
    return np.array([rng.choice(values) for _ in range(D)], np.float32)


def runs(rng: random.Random) -> bytes:
    return packed(codes.encode_runs(vector(rng)))


def entries(rng: random.Random) -> bytes:
    return packed(quantizers.encode_top_k(vector(rng)))


def levels(rng: random.Random) -> bytes:
    sent = np.array([rng.choice((0, 0, 0, 1, -1, 3, -(2**20))) for _ in range(D)])
    return packed(quantizers.encode_qsgd(np.float32(rng.random()), sent))


def packed(bits: np.ndarray) -> bytes:
    """The number of bits, and the bits."""
    return len(bits).to_bytes(2, "big") + np.packbits(bits).tobytes()


def unpacked(path: Path) -> np.ndarray:
    content = path.read_bytes()
    return np.unpackbits(np.frombuffer(content[2:], np.uint8))[: int.from_bytes(content[:2], "big")]


def read_runs(path: Path) -> np.ndarray:
    """The vector; only one message is that of it, apart from how its numbers are listed."""
    bits = unpacked(path)
    found = codes.decode_runs(bits, D)
    assert found.shape == (D,)
    assert found.dtype == np.float32
    again = codes.decode_runs(codes.encode_runs(found), D)
    np.testing.assert_array_equal(again.view(np.uint32), found.view(np.uint32))
    assert len(codes.encode_runs(found)) <= len(bits)
    return found


def read_entries(path: Path) -> np.ndarray:
    """The vector, as it was sent but for zeros, which are not in the message that is made of it again."""
    bits = unpacked(path)
    found = quantizers.decode_top_k(bits, D)
    assert found.shape == (D,)
    assert found.dtype == np.float32
    again = quantizers.encode_top_k(found)
    np.testing.assert_array_equal(quantizers.decode_top_k(again, D).view(np.uint32), _no_minus(found).view(np.uint32))
    assert len(again) <= len(bits)
    return found


def _no_minus(vector: np.ndarray) -> np.ndarray:
    return np.where(vector == 0, np.float32(0), vector)


def read_levels(path: Path) -> Any:
    """The levels; they are in one message only, to the bit."""
    bits = unpacked(path)
    norm, found = quantizers.decode_qsgd(bits, D)
    assert found.shape == (D,)
    np.testing.assert_array_equal(quantizers.encode_qsgd(norm, found), bits)
    return norm, found


TEXTS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "compressor": (compressors.resolve, ("qsgd:levels=4", "top-k:share=0.01,feedback=false", "tv:gamma=0.1")),
    "optimizer": (optimizers.resolve, ("adam:b1=0.8", "fedadam:b1=0.9,tau=1e-3")),
    "schedule": (lambda text: schedules.parse(text, 10), ("cosine:warmup=3", "step:every=5,factor=0.5", "linear")),
    "augmentation": (augmentation.parse, ("flip+crop:padding=4+mixup:alpha=0.2",)),
    "loss": (losses.resolve, ("huber:delta=2", "quantile:q=0.9", "squared")),
    "time model": (participation.resolve_time_model, ("lognormal:sigma=0.5", "equal")),
    "aggregate": (aggregation.resolve, ("trimmed-mean:share=0.2", "krum:attackers=2", "median")),
    "attack": (attacks.attack_of, ("scale:factor=10", "noise:scale=1", "sign-flip")),
    "planted": (planted.parse, ("planted:clients=50,clusters=5",)),
    "grid": (grid.parse, ("lr=log:1e-3:1:5", "cohort=0.1m,10", "adaped.psi_init=1,3.5", "lr=linear:0:1")),
    "probability prior": (bernoulli.parse_prior, ("beta:2,3", "truncated-normal:0.5,0.1")),
}


def some_text(rng: random.Random) -> bytes:
    kind = rng.choice(list(TEXTS))
    return f"{kind}\n{rng.choice(TEXTS[kind][1])}".encode()


def read_text(path: Path) -> Any:
    """The value of a text of the kind that its first line names; of any other kind, of a grid."""
    try:
        kind, _, text = path.read_text("utf-8").partition("\n")
    except UnicodeDecodeError:
        kind, text = "grid", path.read_text("latin-1")
    return TEXTS.get(kind, TEXTS["grid"])[0](text)


WIRES: dict[str, Target] = {
    "run lengths": of_file(runs, read_runs, "a"),
    "entries": of_file(entries, read_entries, "a"),
    "levels": of_file(levels, read_levels, "a"),
    "texts": of_file(some_text, read_text, "a", text=True, share=0.5),
}
