"""Zhao et al.: the example of section III-A, and Figure 6, loss against transmitted bits."""

from __future__ import annotations

from .declared import Estimate, Estimation, Experiment, Printed

PAPER = "Zhao et al."
_COMPRESSORS = {
    "lossless": "lossless",
    "total variation, gamma .01": "tv:gamma=0.01",
    "total variation, codebook of 3": "tv:gamma=0.01,codebook=3",
    "total variation, codebook of 4": "tv:gamma=0.01,codebook=4",
    "QSGD, one level": "qsgd:levels=1",
}


def _compression(setting: str, batch: int, note: str = "") -> Estimation:
    return Estimation(
        setting,
        "compression",
        {"data": "a9a", "batch": batch, "compressors": tuple(_COMPRESSORS.values())},
        tuple(
            Estimate(f"{label}: {words}", f"compressors.{name}.{number}")
            for label, name in _COMPRESSORS.items()
            for words, number in (("gap at the end", "gap"), ("bits of a client", "bits"))
        ),
        quick={"data": "planted:clients=5,clusters=1,examples=40,dim=10", "clients": 5, "steps": 20, "rates": (1.0,)},
        note=note,
    )


EXPERIMENTS = (
    Experiment(
        "network-figure6",
        f"{PAPER}, Figure 6",
        "logistic regression on a9a: gap to the optimum and transmitted bits of compressed gradients",
        1,
        (
            _compression("a9a, an instance a step", 1),
            _compression("a9a, all examples a step", 0, "the paper samples one instance in each step"),
        ),
        note="not the paper's data: a9a replaces covtype; the paper shows a picture of one gradient, without numbers",
    ),
    Experiment(
        "network-demo",
        f"{PAPER}, section III-A",
        "the example x* = (1, -1, 1, -1): entries of descent with total-variation updates",
        1,
        (
            Estimation(
                "gamma .6, rate 1",
                "compression",
                {"compressors": ("lossless",), "steps": 1},
                tuple(
                    Estimate(f"x_{step}[{i}], {way}", f"demo.points.{way}.{step}[{i}]", Printed(value))
                    for way in ("constant", "decaying", "error feedback")
                    for step, point in ((1, (-1.0, -1.0, 1.0, 1.0)), (3, (1.0, -1.0, 1.0, -1.0)))
                    for i, value in enumerate(point)
                ),
                note="no gamma and no rate give the printed steps, because the first printed step is orthogonal "
                "to the gradient",
            ),
        ),
    ),
)
