"""Settings of the histogram study, and its users: drawn from a Dirichlet mixture, or token counts, in groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.core import checks
from jaxpfl.data.sources import token_counts
from jaxpfl.data.sources.token_counts import DirichletMixture, TokenCounts, shares_of
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms.base import Truth, Users
from jaxpfl.estimators.histograms.clusters import Direction
from jaxpfl.studies.study import NOT_PRIVATE, Settings, at_least, refuse_given, within
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown

_FEW = 20
"""Number of users below which the minimum number of tokens per user is lowered."""
_LEAST = (50, 20, 10, 5, 2)
_USERS_OF_A_CLUSTER = 4


def _check_tokens(name: str, tokens: int) -> None:
    checks.count(name, tokens if tokens > 1 else 0)


@dataclass(frozen=True)
class HistogramSettings(Settings):
    """Users' histograms, estimated alone, together, in clusters, and under privacy."""

    data: str = "synthetic"
    """synthetic (a mixture of Dirichlets), irc, csv:FILE with user,token,count, or leaf:FOLDER (Reddit)."""
    tokens: int = within(1_000, _check_tokens)
    """d: size of the vocabulary, the most frequent tokens (all if there are fewer); public under a privacy claim."""
    users: int = within(4_000, checks.count)
    """n of synthetic data, including those set apart."""
    components: int = within(10, checks.count)
    """Clusters of synthetic data."""
    alpha: float = within(200.0, checks.positive)
    """Concentration of synthetic users about their cluster's center."""
    spread: float = within(1.0, at_least(0))
    """Standard deviation of the logarithms of synthetic centers about Zipf's law."""
    samples: int = within(500, checks.count)
    """m, tokens of a synthetic user; their median with --samples-spread."""
    samples_spread: float = within(0.0, at_least(0))
    """Standard deviation of the logarithm of a synthetic user's tokens."""
    least_tokens: int = within(100, checks.count)
    """Real users with fewer tokens are left out; lowered if hardly any has so many."""
    train_share: float = 0.5
    """Share of a real user's tokens used for estimation; estimates are scored on the others."""
    validation: float = within(0.2, at_least(0))
    """Share of the users that lambda and alpha are tuned on."""
    unseen: float = within(0.1, at_least(0))
    """Share of users unseen by every method, which are scored separately."""
    block: int = within(histogram.BLOCK, checks.count)
    """Users per dense block, which affects memory and speed alone."""
    seed: int = 0
    """Seed of every random draw."""
    data_dir: str | None = None
    """Folder that holds irc/; JAXPFL_DATA_DIR unless given."""
    encoding: str | None = None
    """Encoding of csv:FILE, such as latin-1; UTF-8 unless given."""
    clusters: int = within(10, checks.count)
    """k; one per four users if they are few."""
    rounds: int = within(20, checks.count)
    """T of Algorithm 2 and of IFCA without privacy."""
    ifca_rate: float = within(0.1, checks.rate)
    """Rate of IFCA's steps."""
    temperature: float = within(0.5, at_least(0))
    """t of Algorithm 1."""
    direction: Direction = "printed"
    """Direction of Algorithm 1's divergence: as printed, or as in the objective."""
    kept_tokens: int = within(100, checks.count)
    """Tokens that DimRed keeps; a tenth of all if they are fewer."""
    candidates: int = within(200, checks.count)
    """Candidate tokens of private DimRed, the most frequent by the private mean; all if they are fewer."""
    lam: float | None = None
    """lambda of fine-tuning; tuned on the validation users unless given."""
    epsilon: tuple[float, ...] = within((1.0, 3.0, 8.0, 15.0), checks.positive, empty=True)
    """Epsilon of a user, one column of the table each; every release of a row is accounted for."""
    delta: float = within(1e-10, checks.probability)
    """delta of each epsilon."""
    private_clusters: int | None = within(None, checks.count)
    """k under privacy; --clusters unless given."""
    private_rounds: int = within(5, checks.count)
    """T under privacy."""
    mean_share: float = within(0.5, checks.probability)
    """Share of a clustering's privacy budget for its release of the mean; its rounds have the rest."""
    radius: float = within(0.25, checks.positive)
    """C: public clipping norm (L2) of the histograms."""
    clip: float = within(1.0, checks.positive)
    """c of Algorithm 3 as printed."""
    floor: float = within(1e-6, checks.positive)
    """s: floor of every token's estimate before normalisation, which determines the score of local."""
    em_steps: int = within(10, checks.count)
    """Steps of the Dirichlet mixture's EM, and of the Dirichlet fit of each cluster."""
    repetitions: int = within(20, checks.count)
    """Runs, each with its own start and noise, side by side on the same users."""

    def check(self) -> None:
        """Check the settings, independently of the data (see `follow`).

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        super().check()
        if self.data not in ("synthetic", "irc") and not self.data.startswith(("csv:", "leaf:")):
            raise JaxpflError(f"data must be synthetic, irc, csv:FILE or leaf:FOLDER, got {shown(self.data)}")
        if not self.data.startswith("csv:"):
            refuse_given(self, ("encoding",), "is of csv:FILE")
        if self.data == "synthetic":
            refuse_given(self, ("least_tokens", "train_share"), "is of real users, not of synthetic ones")
        else:
            drawn = ("users", "components", "alpha", "spread", "samples", "samples_spread")
            refuse_given(self, drawn, "is of synthetic users, which data takes the place of")
        host_memory.check(
            4 * self.repetitions * self.clusters * self.tokens,
            f"the centers of {self.repetitions} repetitions of {self.clusters} clusters over {self.tokens} tokens need",
            "fewer repetitions, clusters or tokens",
        )
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise JaxpflError(f"lam must be >= 0 and <= 1, got {self.lam}")
        if not self.epsilon:
            refuse_given(self, ("delta", "private_clusters", "private_rounds", "mean_share"), NOT_PRIVATE)


def follow(given: HistogramSettings, counts: TokenCounts | None) -> tuple[HistogramSettings, dict[str, Any]]:
    """Reduce settings at their defaults that are too large for the data.

    Args:
      given: already checked on its own.
      counts: counts of real users; None for synthetic ones.

    Returns:
      The settings, and those that were changed.

    Raises:
      JaxpflError: a setting that was given and that the data cannot hold.
    """
    taken: dict[str, Any] = {}

    def at_most(name: str, most: int, instead: int, why: str = "") -> None:
        value = getattr(given, name)
        if value is None or value <= most:
            return
        if value != getattr(HistogramSettings, name):
            raise JaxpflError(f"{name} must be at most {most}{why}, got {value}")
        taken[name] = instead

    tokens, users = given.tokens, given.users
    if counts is not None:
        vocabulary = len(counts.vocabulary)
        at_most("tokens", vocabulary, vocabulary, f" (those of {given.data})")
        tokens = min(given.tokens, vocabulary)
        sizes, least = counts.most_frequent(tokens).sizes, given.least_tokens
        if least == HistogramSettings.least_tokens and (sizes >= least).sum() < _FEW:
            least = next((n for n in _LEAST if (sizes >= n).sum() >= _FEW), _LEAST[-1])
            taken["least_tokens"] = least
        users = int((sizes >= max(least, 2)).sum())
        if users < 3:
            raise JaxpflError(
                f"{given.data}: three users with least_tokens {max(least, 2)} tokens are needed, got {users}"
            )
    at_most("kept_tokens", tokens, max(1, tokens // 10))
    at_most("candidates", tokens, tokens)
    if not given.floor < 1 / tokens:
        raise JaxpflError(f"floor must be > 0 and below 1/{tokens}, got {given.floor:g}")
    validation, unseen = shares_of(users, given.validation, given.unseen)
    together = users - validation - unseen
    if users > 2 and together > 0:
        few, why = max(1, together // _USERS_OF_A_CLUSTER), f" (the users that estimate, of {users})"
        at_most("clusters", few if given.clusters == HistogramSettings.clusters else together, few, why)
        at_most("private_clusters", together, few, why)
    return replace(given, **taken), taken


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


def read(given: HistogramSettings) -> TokenCounts | None:
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


def prepare(given: HistogramSettings, read: TokenCounts | None = None) -> Prepared:
    """Draw the users, or divide those that were read.

    Raises:
      JaxpflError: settings that `HistogramSettings.check` refuses, or that the users are too few for.
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


def _synthetic(given: HistogramSettings) -> Prepared:
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


def _users(counts: TokenCounts, given: HistogramSettings) -> Users:
    return histogram.from_sparse(counts.indptr, counts.indices, counts.counts, len(counts.vocabulary), given.block)
