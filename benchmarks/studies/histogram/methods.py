"""Settings, users and table rows of the histogram study. Each row is for one method, with or without privacy.

Users are drawn from a Dirichlet mixture, or are real users with token counts. They are divided into clients, validation
users and unseen users. Fine-tuning moves a user's estimate from a shared center toward the user's own histogram;
lambda is the weight of the center. In the rows "by m_u", a user with m_u tokens has lambda = ``alpha / (alpha + m_u)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import checks, full_precision
from jaxpfl.core.randomness import named, numbered
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import clusters as histogram_clusters
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms import tuning as histogram_tuning
from jaxpfl.estimators.histograms.base import Truth, Users, floored
from jaxpfl.estimators.histograms.tuning import Personal, finetuned, fixed, loss, losses, size_weight, toward
from jaxpfl.studies.study import NOT_PRIVATE, Settings, minimum, refuse_given, within
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, shown

from . import dirichlet, printed, simulated_users, starts, token_counts
from .simulated_users import DirichletMixture
from .starts import Direction
from .token_counts import TokenCounts, shares_of

_FEW = 20
"""Smallest number of users; with fewer, the required tokens per user are lowered to the first sufficient value in
`_LEAST`.
"""
_LEAST = (50, 20, 10, 5, 2)
_USERS_OF_A_CLUSTER = 4


@dataclass(frozen=True)
class HistogramSettings(Settings):
    """Settings of the histogram study."""

    data: str = "synthetic"
    """synthetic (a mixture of Dirichlets), irc, csv:FILE with user,token,count, or leaf:FOLDER (Reddit)."""
    tokens: int = within(1_000, minimum(2))
    """Size d of the vocabulary: the d most frequent tokens, or all tokens if there are fewer. The vocabulary is assumed
    to be public."""
    users: int = within(4_000, checks.count)
    """Number n of synthetic users, including validation users and unseen users."""
    components: int = within(10, checks.count)
    """Number of clusters in synthetic data."""
    alpha: float = within(200.0, checks.positive)
    """Concentration of synthetic users about their cluster's center."""
    spread: float = within(1.0, minimum(0))
    """Standard deviation of the logarithms of synthetic centers about Zipf's law."""
    samples: int = within(500, checks.count)
    """Number m of tokens of each synthetic user; with --samples-spread, the median number."""
    samples_spread: float = within(0.0, minimum(0))
    """Standard deviation of the logarithm of a synthetic user's number of tokens."""
    least_tokens: int = within(100, checks.count)
    """Real users with fewer tokens are left out; the default is lowered if too few users would remain."""
    train_share: float = 0.5
    """Share of a real user's tokens used for estimation; the others score the estimates."""
    validation: float = within(0.2, minimum(0))
    """Share of the users on which the amount of fine-tuning (lambda or alpha) is tuned."""
    unseen: float = within(0.1, minimum(0))
    """Share of users that no method sees, and that are scored separately."""
    block: int = within(histogram.BLOCK, checks.count)
    """Users per dense block, which affects only memory and speed."""
    seed: int = 0
    """Seed of every random draw."""
    data_dir: str | None = None
    """Folder that contains irc/; by default JAXPFL_DATA_DIR."""
    encoding: str | None = None
    """Encoding of csv:FILE, such as latin-1; by default UTF-8."""
    clusters: int = within(10, checks.count)
    """Number k of clusters; the default is at most one per four training users."""
    rounds: int = within(20, checks.count)
    """Number T of rounds of Algorithm 2 and of IFCA without privacy."""
    ifca_rate: float = within(0.1, checks.rate)
    """Step size of IFCA."""
    temperature: float = within(0.5, minimum(0))
    """Temperature t of Algorithm 1."""
    direction: Direction = "printed"
    """Direction of Algorithm 1's divergence: as printed, or as in the objective."""
    kept_tokens: int = within(100, checks.count)
    """Number of tokens that DimRed keeps; the default is a tenth of the vocabulary if that has fewer tokens."""
    candidates: int = within(200, checks.count)
    """Number of candidate tokens of private DimRed, the most frequent by the private mean; all if there are fewer."""
    lam: float | None = None
    """Weight lambda of the shared center in fine-tuning; by default tuned on the validation users."""
    epsilon: tuple[float, ...] = within((1.0, 3.0, 8.0, 15.0), checks.positive, empty=True)
    """Values of epsilon per user, one table column each; epsilon covers all releases that a row uses."""
    delta: float = within(1e-10, checks.probability)
    """Delta for each epsilon."""
    private_clusters: int | None = within(None, checks.count)
    """Number of clusters under privacy; by default --clusters."""
    private_rounds: int = within(5, checks.count)
    """Number of rounds under privacy."""
    mean_share: float = within(0.5, checks.probability)
    """Share of a clustering's privacy budget for its release of the mean; the rest is for its rounds."""
    radius: float = within(0.25, checks.positive)
    """Public clipping norm C (L2) of the histograms."""
    clip: float = within(1.0, checks.positive)
    """Clipping constant c of Algorithm 3 as printed."""
    floor: float = within(1e-6, checks.positive)
    """Floor s of every token's estimate before normalization; it largely determines the loss of the row Local."""
    em_steps: int = within(10, checks.count)
    """EM steps of the Dirichlet mixture, and steps of each cluster's Dirichlet fit."""
    repetitions: int = within(20, checks.count)
    """Number of runs on the same users, each with its own initial centers and noise."""

    def check(self) -> None:
        """Check the settings without the data; `follow` checks them against the data.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if self.data not in ("synthetic", "irc") and not self.data.startswith(("csv:", "leaf:")):
            raise JaxpflError(f"data must be synthetic, irc, csv:FILE or leaf:FOLDER, got {shown(self.data)}")
        if not self.data.startswith("csv:"):
            refuse_given(self, ("encoding",), "applies to csv:FILE only")
        if self.data == "synthetic":
            refuse_given(self, ("least_tokens", "train_share"), "applies to real users only")
        else:
            drawn = ("users", "components", "alpha", "spread", "samples", "samples_spread")
            refuse_given(self, drawn, "applies to synthetic users only")
        host_memory.check(
            4 * self.repetitions * self.clusters * self.tokens,
            f"the centers of {self.repetitions} repetitions of {self.clusters} clusters over {self.tokens} tokens need",
            "use fewer repetitions, clusters or tokens",
        )
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise JaxpflError(f"lam must be >= 0 and <= 1, got {self.lam}")
        if not self.epsilon:
            refuse_given(self, ("delta", "private_clusters", "private_rounds", "mean_share"), NOT_PRIVATE)


def follow(given: HistogramSettings, counts: TokenCounts | None) -> tuple[HistogramSettings, dict[str, Any]]:
    """Reduce default settings that are too large for the data.

    Args:
      given: settings that have passed their own checks.
      counts: counts of real users; None for synthetic users.

    Returns:
      The settings, and the new values of the reduced settings by name.

    Raises:
      JaxpflError: if a setting that differs from its default is too large for the data, if ``floor`` is not below
        1 / d, or if there are too few users.
    """
    taken: dict[str, Any] = {}

    def limit(name: str, most: int, instead: int, why: str = "") -> None:
        value = getattr(given, name)
        if value is None or value <= most:
            return
        if value != getattr(HistogramSettings, name):
            raise JaxpflError(f"{name} must be at most {most}{why}, got {value}")
        taken[name] = instead

    tokens, users = given.tokens, given.users
    if counts is not None:
        vocabulary = len(counts.vocabulary)
        limit("tokens", vocabulary, vocabulary, f" (the size of the vocabulary of {given.data})")
        tokens = min(given.tokens, vocabulary)
        sizes, least = counts.most_frequent(tokens).sizes, given.least_tokens
        if least == HistogramSettings.least_tokens and (sizes >= least).sum() < _FEW:
            least = next((n for n in _LEAST if (sizes >= n).sum() >= _FEW), _LEAST[-1])
            taken["least_tokens"] = least
        users = int((sizes >= max(least, 2)).sum())
        if users < 3:
            raise JaxpflError(
                f"{given.data}: at least 3 users must have {max(least, 2)} or more tokens (least_tokens), got {users}"
            )
    limit("kept_tokens", tokens, max(1, tokens // 10))
    limit("candidates", tokens, tokens)
    if not given.floor < 1 / tokens:
        raise JaxpflError(f"floor must be > 0 and below 1/{tokens}, got {given.floor:g}")
    validation, unseen = shares_of(users, given.validation, given.unseen)
    together = users - validation - unseen
    if users > 2 and together > 0:
        few, why = max(1, together // _USERS_OF_A_CLUSTER), f" (the number of training users among {users} users)"
        limit("clusters", few if given.clusters == HistogramSettings.clusters else together, few, why)
        limit("private_clusters", together, few, why)
    return replace(given, **taken), taken


class Group(NamedTuple):
    """A group of users, and the true histograms (or held-out counts) against which their estimates are scored."""

    users: Users
    truth: Truth


Groups: TypeAlias = tuple[Group, Group, Group]
"""Clients, validation users and unseen users."""


class Prepared(NamedTuple):
    """Users of a study, divided into groups.

    Attributes:
      clients: users whose counts the methods use.
      validation: users on which the amount of fine-tuning is tuned (`score_centers`).
      unseen: users held out from training, so that no cluster center depends on them; scored separately.
      vocabulary: the tokens, [d].
      names: the clients' names, [clients].
      population: mixture from which synthetic users are drawn; None for real users.
      kinds: index of the mixture component from which each client is drawn, [clients]; None for real users.
    """

    clients: Group
    validation: Group
    unseen: Group
    vocabulary: np.ndarray
    names: np.ndarray
    population: DirichletMixture | None = None
    kinds: np.ndarray | None = None


def read(given: HistogramSettings) -> TokenCounts | None:
    """Read the counts of real users; return None for synthetic users.

    Raises:
      JaxpflError: if files cannot be read.
    """
    if given.data == "synthetic":
        return None
    if given.data == "irc":
        return token_counts.load_irc(given.data_dir)
    kind, place = given.data.split(":", 1)
    path = Path(place).expanduser()
    return token_counts.read_counts_csv(path, given.encoding) if kind == "csv" else token_counts.read_leaf_counts(path)


def prepare(given: HistogramSettings, read: TokenCounts | None = None) -> Prepared:
    """Draw synthetic users, or divide the real users into groups.

    Raises:
      JaxpflError: as in `HistogramSettings.check`; or if there are too few users for the settings.
    """
    given.check()
    if read is None:
        return _synthetic(given)
    counts = read.most_frequent(given.tokens).active_users(max(given.least_tokens, 2))
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
    # Three dense tables in double precision: counts, histograms, and the histograms' blocks.
    host_memory.check(
        24 * given.tokens * (given.users + given.components),
        f"{given.users} users (of {given.components} components) over {given.tokens} tokens need",
        "use fewer users or tokens",
    )
    rng = np.random.default_rng(given.seed)
    population = simulated_users.zipf_mixture(rng, given.tokens, given.components, given.alpha, given.spread)
    sizes = given.samples * np.exp(given.samples_spread * rng.standard_normal(given.users))
    drawn = simulated_users.draw_users(rng, population, np.maximum(1, np.rint(sizes)).astype(np.int64))
    places = token_counts.groups(rng, given.users, given.validation, given.unseen)

    def group(part: np.ndarray) -> Group:
        users = _users(drawn.counts.select_users(part), given)
        return Group(users, histogram.arrange(drawn.histograms[part], users))

    clients, validation, unseen = map(group, places)
    names, kinds = drawn.counts.users[places[0]], drawn.clusters[places[0]]
    return Prepared(clients, validation, unseen, drawn.counts.vocabulary, names, population, kinds)


def _users(counts: TokenCounts, given: HistogramSettings) -> Users:
    return histogram.from_sparse(counts.indptr, counts.indices, counts.counts, len(counts.vocabulary), given.block)


LAMBDAS = tuple(np.linspace(0.05, 0.95, 10).round(3).tolist())
ALPHAS = tuple(np.geomspace(10, 3000, 10).round(1).tolist())
METHODS = ("FedAvg", "IFCA", "Algorithm 2 + DimRed", "Algorithm 2", "Standardized")
BLENDED = ("Algorithm 2", "Standardized")
"""Methods with an additional row in which users take convex combinations of the centers."""
PUBLIC = "Validation users' mean"
BY_SIZE = ("FedAvg", "Algorithm 2")
"""Methods with an additional row in which the weight of a user's own histogram depends on the user's number of
tokens."""
MOMENT_RADIUS = 1.0
"""B: public clipping norm of a user's standardized deviation over the candidate tokens."""
ONE_RELEASE = ("FedAvg", "FedAvg, denoised")
CLUSTERINGS = ("IFCA", "Algorithm 2 + DimRed", "Algorithm 2", "Standardized")
PRIVATE_METHODS = ONE_RELEASE + CLUSTERINGS
ALGORITHM_3 = "Algorithm 3 (printed)"


def exact_centers(method: str, key: Key, users: Users, given: HistogramSettings) -> Array:
    """Centers [1 or k, d] computed by a non-private method.

    Without noise, ``Standardized`` is Algorithm 2 with random multiples of the mean as initial centers.
    """
    k, s = given.clusters, given.floor
    mean = floored(histogram.mean(users), s)
    if method == "FedAvg":
        return mean[None]
    if method == "Standardized":
        start = histogram_private.private_start(key, mean, k, 1.0, s)
        return histogram_clusters.cluster(users, start, given.rounds, floor=s).centers
    start = starts.far_apart(key, users, k, temperature=given.temperature, floor=s, direction=given.direction)
    if method == "IFCA":
        return histogram_clusters.cluster(users, start, given.rounds, floor=s, rate=given.ifca_rate).centers
    if method == "Algorithm 2":
        return histogram_clusters.cluster(users, start, given.rounds, floor=s).centers
    everything = jnp.arange(users.tokens)
    keep = selected_tokens(starts.second_moment(users, mean, everything), everything, k, given)
    return histogram_clusters.cluster(
        users, start, given.rounds, floor=s, complete=lambda centers: jnp.where(keep, centers, mean)
    ).centers


def selected_tokens(moment: Array, candidates: Array, clusters: int, given: HistogramSettings) -> Array:
    """Mask of the tokens that DimRed keeps, [d] bool."""
    found = starts.directions(moment, candidates, max(clusters - 1, 1))
    threshold = starts.threshold_of(found, given.kept_tokens)
    return starts.token_mask(found, given.tokens, threshold)


class Scored(NamedTuple):
    """Scores of a row: mean loss, mean loss of unseen users, lambda or alpha, and each user's loss [blocks, c]."""

    loss: Array
    unseen: Array
    chosen: Array
    users: Array


def score(personal: Personal, groups: Groups, chosen: Scalar = jnp.nan) -> Scored:
    """Score a row; unseen users are assigned to centers and fine-tuned with their own counts only."""
    clients, _, unseen = groups
    own = losses(*clients, personal)
    mean = own.sum() / jnp.maximum(clients.users.number, 1)
    return Scored(mean, loss(*unseen, personal), jnp.asarray(chosen), own)


def score_centers(
    centers: Array, groups: Groups, tuning: Literal["none", "lambda", "blend", "size"], floor: float, lam: float | None
) -> Scored:
    """Score the row of a method's centers [k, d]: the nearest center, or a blend of all, with fine-tuning or without.

    Lambda or alpha (by "size") is tuned only on the validation users, unless ``lam`` is given.
    """
    if tuning == "none":
        return score(finetuned(centers, fixed(1.0), floor), groups)
    point = (histogram_tuning.between if tuning == "blend" else histogram_tuning.nearest_center)(centers)
    weight, values = (size_weight, ALPHAS) if tuning == "size" else (fixed, LAMBDAS)
    best: Any = lam
    if lam is None or tuning == "size":
        best = histogram_tuning.tuned(*groups[1], jnp.array(values), point, weight, floor)[0]
    return score(toward(point, weight(best), floor), groups, best)


@partial(full_precision.jit, static_argnums=(2, 3, 4))
def _score_runs(centers: Array, groups: Groups, *how: Any) -> Scored:
    return jax.vmap(lambda at: score_centers(at, groups, *how))(centers)


def score_methods(centers: Mapping[str, Array], groups: Groups, given: HistogramSettings) -> dict[str, Scored]:
    """Score all rows of each method's centers, [runs, k, d]. Rows of the same kind share a compiled program."""
    found = {}
    for name, at in centers.items():
        rows = {name: "none", f"{name} + FT": "lambda"}
        if name in BLENDED:
            rows[f"{name}, blended + FT"] = "blend"
        if name in BY_SIZE:
            rows[f"{name} + FT by m_u"] = "size"
        found |= {row: _score_runs(at, groups, tuning, given.floor, given.lam) for row, tuning in rows.items()}
    return found


def score_references(
    centers: Array, groups: Groups, population: DirichletMixture | None, given: HistogramSettings
) -> dict[str, Scored]:
    """Scores of Dirichlet models around Algorithm 2's centers [k, d], and of the validation users' mean.

    The Dirichlet models are a Dirichlet distribution fitted to each cluster, a Dirichlet mixture fitted by EM, and for
    synthetic users the true population, whose Bayes estimate is optimal. The last row fine-tunes the validation users'
    mean. Because this mean uses no client's data, it costs the clients no privacy, and is the baseline for FedAvg with
    large noise.
    """
    s, users = given.floor, groups[0].users
    start = dirichlet.around(centers, 100.0)
    hard = dirichlet.em(users, start, given.em_steps, hard=centers).mixture
    mixture = dirichlet.em(users, start, given.em_steps).mixture
    public = floored(histogram.mean(groups[1].users), s)[None]
    rows = {
        f"{PUBLIC} + FT": score_centers(public, groups, "lambda", s, given.lam),
        "Algorithm 2, a Dirichlet each": score(dirichlet.empirical_bayes(hard, centers, s), groups),
        "Dirichlet mixture by EM": score(dirichlet.posterior(mixture, s), groups),
    }
    if population is None:
        return rows
    shares, known = (
        jnp.asarray(part, jnp.float32) for part in (population.shares, population.alpha * population.centers)
    )
    bayes = dirichlet.posterior(dirichlet.Mixture(shares, known), s)
    return rows | {"Bayes, population known": score(bayes, groups)}


class Choice(NamedTuple):
    """Settings of a private method: k, T, clipping norm C, and the first release's fraction of the privacy budget."""

    clusters: int
    rounds: Scalar
    radius: Scalar
    mean_share: Scalar


class Noise(NamedTuple):
    """Noise of the private methods for one privacy budget (epsilon, delta).

    Attributes:
      alone: noise multiplier of a method with a single release; `divided` computes the multipliers for several
        releases.
      printed_epsilon: eps of each part of one call of Algorithm 3 as printed.
      printed_stddev: standard deviation of the noise in these calls.
    """

    alone: Scalar
    printed_epsilon: Scalar
    printed_stddev: Scalar


def noise_of(given: HistogramSettings, epsilon: float) -> Noise:
    """Noise for which all releases used by one private row are together (epsilon, delta)-DP."""
    alone = histogram_private.calibrated(epsilon, given.delta, 1)
    part = printed.call_budget(epsilon, given.delta, given.private_rounds)
    return Noise(alone, part[0], printed.gaussian_stddev(*part))


def method_choices(given: HistogramSettings) -> dict[str, Choice]:
    """Settings of every private method."""
    clusters = given.private_clusters or given.clusters
    shared = Choice(clusters, given.private_rounds, given.radius, given.mean_share)
    alone = Choice(1, 0, given.radius, 1.0)
    return {name: alone if name in ONE_RELEASE else shared for name in PRIVATE_METHODS}


def divided(method: str, alone: Scalar, choice: Choice) -> tuple[Scalar, Scalar, Scalar]:
    """Noise multiplier for the first release, multiplier for each further release, and number of further releases."""
    if method in ONE_RELEASE:
        return alone, alone, 0
    others = choice.rounds + (method == "Algorithm 2 + DimRed")
    return *histogram_private.divided(alone, others, choice.mean_share), others


def private_centers(
    method: str, key: Key, users: Users, alone: Scalar, choice: Choice, given: HistogramSettings
) -> Array:
    """Centers [1 or k, d] computed by a private method; the privacy accounting covers every use of the users' data.

    Args:
      method: name in `PRIVATE_METHODS`.
      key: random key of the initial centers and the noise; each method, budget and choice derives a separate stream.
      users: the users.
      alone: noise multiplier of a single release that is as private as all releases together; may be traced.
      choice: the method's settings; k is static, the others may be traced.
      given: the study's settings, for the floor, IFCA's step size and DimRed's numbers of tokens.
    """
    s, k = given.floor, choice.clusters
    key = numbered(named(key, method, given), alone, *choice)
    of_first, of_rounds, of_moment = jax.random.split(key, 3)
    first_noise, noise, _ = divided(method, alone, choice)
    first = histogram_private.release_of_all(of_first, users, radius=choice.radius, noise=first_noise)
    if method == "FedAvg":
        return histogram_private.private_mean(first, s)[None]
    if method == "FedAvg, denoised":
        known = histogram_private.initial_mean(first, choice.radius, first_noise)
        return histogram_private.denoised_mean(known, s)[None]
    how = {"radius": choice.radius, "noise": noise, "first_noise": first_noise, "floor": s}
    if method == "Standardized":
        return histogram_private.cluster_standardised(of_rounds, users, first, k, choice.rounds, **how)
    keep = None
    if method == "Algorithm 2 + DimRed":
        mean = histogram_private.private_mean(first, s)
        candidates = jax.lax.top_k(mean, given.candidates)[1]  # computed from the private mean, which costs no privacy
        moment = starts.second_moment(users, mean, candidates, MOMENT_RADIUS)
        keep = selected_tokens(
            histogram_clusters.noisy_moment(of_moment, moment, MOMENT_RADIUS, noise), candidates, k, given
        )
    rate = given.ifca_rate if method == "IFCA" else 1.0
    return histogram_private.cluster(of_rounds, users, first, k, choice.rounds, rate=rate, keep=keep, **how)


def all_private_centers(
    key: Key, users: Users, noise: Noise, choices: Mapping[str, Choice], given: HistogramSettings
) -> dict[str, Array]:
    """Centers from every private method, and from Algorithm 3 as printed, whose initial centers are not private."""
    made = {name: private_centers(name, key, users, noise.alone, choices[name], given) for name in PRIVATE_METHODS}
    own = numbered(named(key, ALGORITHM_3, given), *noise)
    of_start, of_printed = jax.random.split(own)
    clusters = given.private_clusters or given.clusters
    start = starts.far_apart(of_start, users, clusters, temperature=given.temperature, floor=given.floor)
    return made | {
        ALGORITHM_3: printed.cluster(
            of_printed,
            users,
            start,
            given.private_rounds,
            epsilon=noise.printed_epsilon,
            stddev=noise.printed_stddev,
            clip=given.clip,
            floor=given.floor,
        )
    }


EXACT, BASELINE = "non-private", "FedAvg + FT"
CLUSTERING = {True: "Algorithm 2", False: "Standardized"}
"""Method whose centers are exported and combined by the users: without privacy (True) and with privacy (False)."""
EXPORTED = ("users", "vocabulary", "histograms", "centers", "cluster", "lam")
"""Names of the arrays in an exported archive, see `export`."""
PRINTED = {
    "Local": (5.093, 5.093), "FedAvg": (1.054, 1.115), "IFCA": (1.036, 1.110), "Algorithm 2 + DimRed": (0.971, 0.990),
    "Algorithm 2": (0.930, 1.053), "FedAvg + FT": (0.912, 0.958), "IFCA + FT": (0.875, 0.948),
    "Algorithm 2 + DimRed + FT": (0.883, 0.904), "Algorithm 2 + FT": (0.868, 0.951),
}  # fmt: skip
"""The paper's losses on Reddit, without and with privacy (epsilon 15, delta 1e-10)."""
ORDER = (
    "Local", "FedAvg", "FedAvg, denoised", "IFCA", "Algorithm 2 + DimRed", "Algorithm 2", "Standardized", ALGORITHM_3,
    BASELINE, "FedAvg, denoised + FT", "IFCA + FT", "Algorithm 2 + DimRed + FT", "Algorithm 2 + FT",
    "Standardized + FT", f"{ALGORITHM_3} + FT", "FedAvg + FT by m_u", "Algorithm 2 + FT by m_u",
    "Algorithm 2, blended + FT", "Standardized, blended + FT", "Algorithm 2, a Dirichlet each",
    "Dirichlet mixture by EM", f"{PUBLIC} + FT", "Bayes, population known",
)  # fmt: skip


def exported(column: str) -> str:
    """Name of the table row, in a column, whose histograms `export` writes."""
    return f"{CLUSTERING[column == EXACT]}, blended + FT"


class Made(NamedTuple):
    """Result of the study: the summary as JSON, and arrays for plots and export.

    Attributes:
      given: the settings after `follow`.
      result: summary, see `run`.
      data: the users.
      centers: centers of the method in `CLUSTERING` in the first run, [k, d], by column.
      series: mean losses by "row, column", [runs] each; [1] for rows that do not depend on the run.
    """

    given: HistogramSettings
    result: dict[str, Any]
    data: Prepared
    centers: dict[str, np.ndarray]
    series: dict[str, np.ndarray]
