"""The users of a histogram study: drawn from a Dirichlet mixture, or from token counts, divided into groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpfl.core import checks
from jaxpfl.data.sources import token_counts
from jaxpfl.data.sources.token_counts import DirichletMixture, TokenCounts
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms.base import Truth, Users
from jaxpfl.studies.settings import at_least, refuse_given
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown


@dataclass(frozen=True)
class HistogramData:
    """Source of the histograms."""

    data: str = "synthetic"
    """synthetic (a mixture of Dirichlets), irc, csv:FILE with user,token,count, or leaf:FOLDER (Reddit)."""
    tokens: int = 1_000
    """d: size of the vocabulary, the most frequent tokens (all if there are fewer); public under a privacy claim."""
    users: int = 4_000
    """n of synthetic data, including those set apart."""
    components: int = 10
    """Clusters of synthetic data."""
    alpha: float = 200.0
    """Concentration of synthetic users about their cluster's center."""
    spread: float = 1.0
    """Standard deviation of the logarithms of synthetic centers about Zipf's law."""
    samples: int = 500
    """m, tokens of a synthetic user; their median with --samples-spread."""
    samples_spread: float = 0.0
    """Standard deviation of the logarithm of a synthetic user's tokens."""
    least_tokens: int = 100
    """Real users with fewer tokens are left out; lowered if hardly any has so many."""
    train_share: float = 0.5
    """Share of a real user's tokens used for estimation; estimates are scored on the others."""
    validation: float = 0.2
    """Share of the users that lambda and alpha are tuned on."""
    unseen: float = 0.1
    """Share of users unseen by every method, which are scored separately."""
    block: int = histogram.BLOCK
    """Users per dense block, which affects memory and speed alone."""
    seed: int = 0
    """Seed of every random draw."""
    data_dir: str | None = None
    """Folder that holds irc/; JAXPFL_DATA_DIR unless given."""
    encoding: str | None = None
    """Encoding of csv:FILE, such as latin-1; UTF-8 unless given."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        for name in ("tokens", "users", "components", "samples", "least_tokens", "block"):
            checks.count(name, getattr(self, name))
        checks.count("tokens", self.tokens if self.tokens > 1 else 0)
        checks.positive("alpha", self.alpha)
        for name in ("validation", "unseen"):
            at_least(name, getattr(self, name), 0)
        at_least("spread", self.spread, 0)
        at_least("samples_spread", self.samples_spread, 0)
        if self.data not in ("synthetic", "irc") and not self.data.startswith(("csv:", "leaf:")):
            raise JaxpflError(f"data must be synthetic, irc, csv:FILE or leaf:FOLDER, got {shown(self.data)}")
        if not self.data.startswith("csv:"):
            refuse_given(self, ("encoding",), "is of csv:FILE")
        if self.data == "synthetic":
            refuse_given(self, ("least_tokens", "train_share"), "is of real users, not of synthetic ones")
        else:
            drawn = ("users", "components", "alpha", "spread", "samples", "samples_spread")
            refuse_given(self, drawn, "is of synthetic users, which data takes the place of")


class Group(NamedTuple):
    """Users and the ground truth of their scores."""

    users: Users
    truth: Truth


class Prepared(NamedTuple):
    """Users of a study, in groups.

    Attributes:
      clients: the users that take part.
      validation: those that lambda and alpha are tuned on.
      unseen: those that no method sees, scored separately.
      vocabulary: the tokens [d].
      names: the clients' names [clients].
      population: the mixture that synthetic users are drawn from; None for real ones.
      kinds: each client's component of that mixture [clients]; None for real users.
    """

    clients: Group
    validation: Group
    unseen: Group
    vocabulary: np.ndarray
    names: np.ndarray
    population: DirichletMixture | None = None
    kinds: np.ndarray | None = None


def read(given: HistogramData) -> TokenCounts | None:
    """Counts of real users; None for synthetic ones.

    Raises:
      JaxpflError: files that cannot be read.
    """
    if given.data == "synthetic":
        return None
    if given.data == "irc":
        return token_counts.load_irc(given.data_dir)
    kind, place = given.data.split(":", 1)
    path = Path(place).expanduser()
    return token_counts.read_counts_csv(path, given.encoding) if kind == "csv" else token_counts.read_leaf_counts(path)


def prepare(given: HistogramData, read: TokenCounts | None = None) -> Prepared:
    """Draw the users, or divide those that were read.

    Raises:
      JaxpflError: settings that `HistogramData.check` refuses, or that the users are too few for.
    """
    given.check()
    if read is None:
        return _synthetic(given)
    if len(read.vocabulary) < given.tokens:
        raise JaxpflError(f"tokens must be at most the {len(read.vocabulary)} of {given.data}, got {given.tokens}")
    counts = read.most_frequent(given.tokens).with_tokens(max(given.least_tokens, 2))
    parts = token_counts.split(
        counts,
        validation=given.validation,
        unseen=given.unseen,
        train_share=given.train_share,
        seed=given.seed,
    )
    clients, validation, unseen = (Group(_users(p.own, given), _users(p.held_out, given)) for p in parts)
    return Prepared(clients, validation, unseen, counts.vocabulary, parts.users.own.users)


def _synthetic(given: HistogramData) -> Prepared:
    # Three dense tables in double precision: the counts, the histograms, and their blocks.
    host_memory.check(
        24 * given.tokens * (given.users + given.components),
        f"{given.users} users (of {given.components} components) over {given.tokens} tokens need",
        "fewer users or tokens",
    )
    rng = np.random.default_rng(given.seed)
    population = token_counts.zipf_mixture(rng, given.tokens, given.components, given.alpha, given.spread)
    sizes = given.samples * np.exp(given.samples_spread * rng.standard_normal(given.users))
    drawn = token_counts.draw_users(rng, population, np.maximum(1, np.rint(sizes)).astype(np.int64))
    places = token_counts.groups(rng, given.users, given.validation, given.unseen)

    def group(part: np.ndarray) -> Group:
        users = _users(drawn.counts.of_users(part), given)
        return Group(users, histogram.in_blocks(drawn.histograms[part], users))

    clients, validation, unseen = map(group, places)
    names, kinds = drawn.counts.users[places[0]], drawn.clusters[places[0]]
    return Prepared(clients, validation, unseen, drawn.counts.vocabulary, names, population, kinds)


def _users(counts: TokenCounts, given: HistogramData) -> Users:
    return histogram.from_sparse(counts.indptr, counts.indices, counts.counts, len(counts.vocabulary), given.block)
