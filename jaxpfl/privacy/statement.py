"""Privacy statement: an (epsilon, delta) guarantee with its assumptions."""

from __future__ import annotations

from typing import Any, NamedTuple

NOT_COVERED = (
    "hyper-parameters chosen on private data, the means, deviations and imputed values of inputs, other runs "
    "on the same users, outputs of the simulation other than the model"
)
_NOT_COVERED_OF_SILOS = (
    "hyper-parameters chosen on private data, means, deviations and imputed values of inputs, the numbers of "
    "{numbers}, other runs on the same {unit}s, outputs of the simulation other than the models"
)
SEED = {
    "run": "observers who know the seed",
    "secret": "observers who can read the process or its checkpoints before it ends",
}
GIVEN_START = "it starts from given parameters: any privacy loss in training them comes on top"
SAME_USERS = "it starts from a non-private model of the same users, whose privacy loss is not covered"
SPENT_BEFORE = "it starts from a private model of the same users, whose epsilon comes on top"
STOPPED = (
    "the run stops early (patience) in a round that is chosen on the users' validation examples without noise; the "
    "claim covers all rounds, but not this choice"
)
CUT = (
    "what a client's state (or its position in the order of its examples) reveals about rounds in which the client was "
    "drawn but left out of a full cohort"
)


class Statement(NamedTuple):
    """Privacy claim of a run.

    Attributes:
      relation: neighboring relation.
      unit: unit of privacy: ``user`` (a client with all its data), ``example`` (a single example of a silo) or
        ``person`` (all examples of a person at a silo).
      participation: full, poisson, uniform or cyclic.
      sampling_rate: probability q that a client is in a round's cohort, or an example or person in a mini-batch.
      noise_multiplier: noise multiplier z of a round, for all its releases together.
      clipping_norm: clipping norm C; C1 and C2 for noise in every step; None for adaptive clipping.
      rounds: number of rounds R.
      delta, epsilon: delta and epsilon of the claim.
      accountant: accountant that computed epsilon.
      paper_epsilon: epsilon by Theorem 5 of Ozkara et al. 2023, which is not a valid bound; None if the theorem does
        not apply.
      own_share: whether z is the noise multiplier of a client's own share of the noise, as with compressed uploads.
      noise_seed: source of the randomness of cohorts and noise: ``run`` (the run's seed) or ``secret`` (the operating
        system).
      cut: whether a cohort may be cut to a largest size. Whether a drawn client takes part, and hence its state, then
        depends on the other drawn clients. `Fit.statement` and run folders set this to False if the method's uploads do
        not depend on the client's state.
      caveats: limitations of the claim in this run.
      silos: for the units ``example`` and ``person``, one dictionary for each number of examples (and persons) that a
        silo has, with the keys ``examples``, ``clients``, ``sampling_rate``, ``noise_multiplier``, ``batches``,
        ``gradients_of_a_batch`` and ``epsilon``, and for the unit ``person`` also ``persons``. The fields ``epsilon``,
        ``sampling_rate`` and ``noise_multiplier`` then belong to the dictionary with the largest epsilon.
      cycle: number of rounds from one turn of a client to the next, if clients take turns. ``sampling_rate`` then
        applies to a turn.
      bands: number of bands of correlated noise; 1 for independent noise.
      noise_ratio: root mean squared error of the server's models due to noise, relative to independent noise with the
        same epsilon and cohorts; 1 for independent noise.
    """

    relation: str
    unit: str
    participation: str
    sampling_rate: float
    noise_multiplier: float
    clipping_norm: float | tuple[float, ...] | None
    rounds: int
    delta: float
    epsilon: float
    accountant: str
    paper_epsilon: float | None
    own_share: bool = False
    noise_seed: str = "run"
    cut: bool = False
    caveats: tuple[str, ...] = ()
    silos: tuple[dict[str, Any], ...] = ()
    cycle: int | None = None
    bands: int = 1
    noise_ratio: float = 1.0

    def __str__(self) -> str:
        text = self._silo_text() if self.silos else self._user_text()
        if self.noise_seed == "secret":
            text += "; noise from the operating system, whose seed is not kept"
        uncovered = ", ".join([NOT_COVERED, *[CUT] * self.cut])
        if self.silos:
            numbers = "examples and persons" if self.unit == "person" else "examples"
            uncovered = _NOT_COVERED_OF_SILOS.format(numbers=numbers, unit=self.unit)
        return "; ".join([text, *self.caveats, f"not covered: {uncovered}, and {SEED[self.noise_seed]}"])

    def _user_text(self) -> str:
        clip = self.clipping_norm
        clips = clip if isinstance(clip, tuple) else [] if clip is None else [clip]
        terms = [
            f"{self.participation} participation",
            f"q = {self.sampling_rate:.4g}",
            f"z = {self.noise_multiplier:.4g}{' (own share of the noise)' if self.own_share else ''}",
            f"C = {' and '.join(f'{c:g}' for c in clips)}" if clips else "adaptive C",
            f"R = {self.rounds}",
        ]
        if self.cycle is not None:
            terms.append(f"a turn every {self.cycle} rounds")
        if self.bands > 1:
            ratio = f"with {self.noise_ratio:.3g} times the prefix-sum error of independent noise"
            terms.append(f"noise correlated by a banded factorization of {self.bands} bands {ratio}")
        text = (
            f"eps = {self.epsilon:.4g} at delta = {self.delta:g} for each {self.unit} ({self.relation}, by "
            f"{self.accountant}; {', '.join(terms)})"
        )
        if self.paper_epsilon is not None and self.accountant != "paper":
            text += f"; the paper's formula, which is not a valid bound, gives {self.paper_epsilon:.4g}"
        return text

    def _silo_text(self) -> str:
        worst = max(self.silos, key=lambda silo: silo["epsilon"])
        number = sum(silo["clients"] for silo in self.silos)
        least = min(silo["epsilon"] for silo in self.silos)
        each = worst["gradients_of_a_batch"]
        gradients = f"{each} gradients of each of {worst['batches']}" if each > 1 else f"{worst['batches']}"
        size, all_of = f"{worst['examples']} examples", "example of a silo"
        if self.unit == "person":
            size, all_of = (
                f"{worst['persons']} persons with {size}",
                "person of a silo (all of the person's examples)",
            )
        terms = [
            f"by {self.accountant}",
            f"q = {self.sampling_rate:.4g} of {size}",
            f"z = {self.noise_multiplier:.4g}",
            f"C = {self.clipping_norm:g}",
            f"{gradients} poisson batches in R = {self.rounds} rounds",
        ]
        if self.epsilon - least > 5e-4 * self.epsilon:
            terms.append(f"smallest for a silo {least:.4g}")
        return (
            f"eps = {self.epsilon:.4g} at delta = {self.delta:g} for each {all_of}, the largest of {number} "
            f"silos' ({self.relation}, {', '.join(terms)}); assumes that a silo takes part in every round; covers "
            "what leaves the silo, and its personalized model after the last round"
        )
