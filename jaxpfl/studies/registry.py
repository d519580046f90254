"""Table of the studies by name. A new study needs a module and an entry in this table, which commands and tests use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from jaxpfl.studies.study import Study
from jaxpfl.support.errors import unknown_name

STUDIES: Mapping[str, str] = {
    "gaussian": "Means of Gaussian clients: local, global, personalized, quantized and private, beside exact errors.",
    "bernoulli": "Probabilities of Bernoulli clients: local, global, personalized, as in the paper, and private bits.",
    "normal-means": "Estimates with standard errors (--csv: also successes,trials and count,exposure): four priors.",
    "mixture": "Clients of k kinds: EM, the paper's Algorithm 3, and private k-means.",
    "histogram": "Users' histograms over a vocabulary: alone, averaged, clustered, fine-tuned, and private.",
    "regression": "Linear regression of clients from one Gaussian: alone, pooled, known prior, Algorithm 4, EM.",
    "regression-mixture": "AdaMix's Table 3: regressions from two Gaussians, by Algorithms 1 and 6, and by EM.",
    "logistic-regression": "Logistic regression of clients from one Gaussian: alone, pooled, known prior, Algorithm 5.",
    "network": "Planted clusters of clients: the network lasso over lambda, beside local, FedAvg, IFCA and others.",
    "ditto": "Ditto's estimate of a mean: its error over lambda, beside the posterior mean, its optimum.",
    "compression": "Loss against transmitted bits: total variation, codebooks, QSGD, top-k, sign and uniform.",
    "elections": "US counties' political tendencies: six-fold cross-validation over the elections of 2000 to 2020.",
    "when": "When collaboration helps: the theoretical gain, the clients that a gain requires, and phase diagrams.",
}
"""Description of each study for ``--help``, by name; the module of this name, with underscores, defines ``STUDY``."""

_PAPERS = (
    "histogram",
    "regression",
    "regression-mixture",
    "logistic-regression",
    "network",
    "ditto",
    "compression",
    "elections",
)
"""Studies that reproduce papers' experiments; their modules are in ``jaxpfl.benchmarks.studies``."""


def get(name: str) -> Study:
    """Import and return the study with this name.

    Raises:
      JaxpflError: if the name is unknown; the message suggests the nearest known name.
    """
    if name not in STUDIES:
        raise unknown_name("study", name, STUDIES)
    folder = "jaxpfl.benchmarks.studies" if name in _PAPERS else "jaxpfl.studies"
    return importlib.import_module(f"{folder}.{name.replace('-', '_')}").STUDY
