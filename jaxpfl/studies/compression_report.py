"""Table and plots of the study of compressed updates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.studies import compression_demo
from jaxpfl.studies.plots import log_ticks
from jaxpfl.studies.report import number
from jaxpfl.studies.study import Block
from jaxpfl.support.presentation import COLORS, GRID, INK, new_axes, new_table, save


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of the compressors, and lines on the demo, from `compression.run`'s result."""
    given = result["settings"]
    table = new_table(
        f"{given['data']}: logistic regression of {result['clients']} clients, {result['dim']} parameters, "
        f"{given['steps']} steps",
        "gap: of the loss to the optimum, at the rate (times 1/L) that makes it least; kbit: what a client uploads, "
        "in all steps, and until the gap first falls below, at the rate that makes it least; -: at no rate",
    )
    table.add_column("compressor", style="bold", no_wrap=True)
    targets = [f"{target:g}" for target in given["targets"]]
    for name in ("rate", "gap", "kbit", *(f"to {target}" for target in targets)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in result["compressors"].items():
        reached = (row["bits_to"][target] for target in targets)
        table.add_row(name, f"{row['rate']:g}", f"{row['gap']:.2g}", *map(_kbit, (row["bits"], *reached)))
    return [table, *compression_demo.said(result["demo"])]


def _kbit(bits: float | None) -> str:
    return number(None if bits is None else bits / 1000)


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot the gap against the bits: the total-variation updates, and all other compressors with the best of those."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(result["compressors"])
    updates = [name for name in names if name.startswith("tv:")]
    others = [name for name in names if name not in updates]
    pictures = {"bits": [*others, *_shortest(result, updates)], "bits-total-variation": [*updates, *others[:1]]}
    return [_draw(folder, name, result, shown) for name, shown in pictures.items() if shown]


def _shortest(result: dict[str, Any], updates: list[str]) -> list[str]:
    """The total-variation update of least gap, and the one of least gap among those with a codebook."""
    gap = {name: result["compressors"][name]["gap"] for name in updates}
    kinds = ([n for n in updates if ("codebook" in n) == coded] for coded in (False, True))
    return [min(kind, key=gap.__getitem__) for kind in kinds if kind]


def _draw(folder: Path, name: str, result: dict[str, Any], shown: list[str]) -> Path:
    setting = f"{result['settings']['data'].partition(':')[0]}, {result['clients']} clients"
    figure, axes = new_axes("kbit that a client has uploaded", "gap of the loss to the optimum", setting)
    longest, least = 1.0, 1.0
    for text, color in zip(shown, itertools.cycle((INK, *COLORS)), strict=False):
        curve = result["compressors"][text]["curve"]
        bits, gap = np.array(curve["bits"])[1:] / 1000, np.array(curve["gap"])[1:]
        axes.plot(bits, gap, color=color, linewidth=1.5, label=text)
        longest, least = max(longest, bits[-1]), min(least, bits[0])
    axes.set_yscale("log")
    axes.grid(axis="y", which="both", color=GRID, linewidth=0.6)
    log_ticks(axes.xaxis, [least, longest])
    figure.legend(frameon=False, fontsize=8, loc="outside lower left", ncols=2)
    return save(figure, folder, name)
