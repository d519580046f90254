"""Parsers of settings that are texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_target import Target, of_file

from jaxpfl.algorithms.parts import augmentation, optimizers, schedules
from jaxpfl.core import participation
from jaxpfl.data.sources import planted
from jaxpfl.models import metrics
from jaxpfl.runs.sweep import grid
from jaxpfl.studies import bernoulli
from jaxpfl.uploads.compression import compressors
from jaxpfl.uploads.robust import aggregation, attacks

TEXTS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "compressor": (compressors.resolve, ("qsgd:levels=4", "top-k:share=0.01,feedback=false", "tv:gamma=0.1")),
    "optimizer": (optimizers.resolve, ("adam:b1=0.8", "fedadam:b1=0.9,tau=1e-3")),
    "schedule": (lambda text: schedules.parse(text, 10), ("cosine:warmup=3", "step:every=5,factor=0.5", "linear")),
    "augmentation": (augmentation.parse, ("flip+crop:padding=4+mixup:alpha=0.2",)),
    "loss": (metrics.parse_loss, ("huber:delta=2", "quantile:q=0.9", "squared")),
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


WIRES: dict[str, Target] = {"texts": of_file(some_text, read_text, "a", text=True, share=0.5)}
