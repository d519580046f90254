r"""AdaMix: personalization by a Gaussian-mixture prior that the server fits (Ozkara et al. 2023, Algorithm 1).

The personalized models are theta_i, with losses f_i. Component l = 1 ... k of the prior has probability p_l, center
mu_l and variance s_l^2.

.. math:: \theta_i \leftarrow \theta_i - \eta \nabla [ f_i(\theta_i) - \log \sum_l p_l N(\theta_i; \mu_l, s_l^2 I) ],
   \qquad (p, \mu, s^2) \leftarrow \operatorname{EM}(\theta_1, \theta_2, \dots)

Here eta is the learning rate. The method is `map_personalization` with this prior. The server receives each model of
the cohort individually. Under differential privacy, the server runs EM on noisy sums only (`parts.private_em`).

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

import numpy as np

from jaxpfl.algorithms.map_personalization import MapHyper, map_personalization
from jaxpfl.algorithms.parts import private_em
from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.core.protocol import Algorithm, ServerContext, Stacked
from jaxpfl.core.types import Key, Metrics
from jaxpfl.models import Task
from jaxpfl.priors import Prior, gaussian_mixture
from jaxpfl.priors.gaussian_mixture import Mixture
from jaxpfl.support.errors import JaxpflError


def adamix(task: Task, work: LocalWork, *, components: int = 2, em_steps: int = 20, scaling: str = "sum") -> Algorithm:
    """AdaMix: personalization with a Gaussian-mixture prior that the server fits to the clients' models.

    Each client keeps its own model theta_i, which is its personalized model. There is no global model.
    Reference: Ozkara et al. 2023, Algorithm 1.

    Args:
      task: the task; any model is supported, and theta_i consists of all its parameters.
      work: the local work in a round.
      components: number k of mixture components, at most the number of clients in a round. With more centers than
        models, each center would fit a single model with the smallest allowed variance.
      em_steps: number of EM steps in a round.
      scaling: definition of a client's loss f_i: the "sum" of its examples' losses, or their "mean".

    Raises:
      JaxpflError: if there is no component, if the privacy mechanism is not central noise with a fixed clipping norm,
        or if its noise multiplier or clipping norm differs between the runs of a sweep. An error is also raised when a
        run starts if there are more components than clients in a round.
    """
    if components < 1:
        raise JaxpflError(f"adamix.components must be >= 1, got {components}")

    def prior(hp: MapHyper) -> Prior:
        return gaussian_mixture.prior(components, s2_init=hp.scale_init, floor=hp.scale_floor, em_steps=em_steps)

    if work.privacy is not None and (work.privacy.noise != "central" or work.privacy.quantile is not None):
        raise JaxpflError("adamix supports only noise='central' and quantile=None (a fixed clipping norm)")
    algorithm = map_personalization(task, work, prior=prior, estimate="fit", scaling=scaling)

    def init(key: Key, hp: MapHyper, ctx: ServerContext) -> Mixture:
        if components > ctx.expected_cohort:
            raise JaxpflError(
                f"adamix.components must be at most {ctx.expected_cohort:g} (the number of clients in a round), got "
                f"{components}: otherwise every client's model would be a component of its own"
            )
        return algorithm.server.init(key, hp, ctx)

    server = algorithm.server._replace(init=init, predict_global=None)
    if work.privacy is None:
        return algorithm._replace(server=server)
    if np.ndim(work.privacy.noise_multiplier) or np.ndim(work.privacy.clipping_norm):
        raise JaxpflError(
            "adamix does not support sweeps over noise_multiplier or clipping_norm: set each to one number"
        )
    z, limit = float(np.asarray(work.privacy.noise_multiplier)), float(np.asarray(work.privacy.clipping_norm))

    def update(key: Key, hp: MapHyper, ctx: ServerContext, gamma: Mixture, uploads: Stacked) -> tuple[Mixture, Metrics]:
        origin, noise = prior(hp).center(gamma), {"clipping_norm": limit, "noise_multiplier": z}
        here = (uploads.total, uploads.valid, ctx.round == 0)
        gamma = private_em.server_step(key, gamma, origin, *here, **noise, floor=hp.scale_floor, steps=em_steps)
        return gamma, prior(hp).report(gamma)

    noise = work.privacy.stream
    if noise is not None:
        noise = noise._replace(name=f"{noise.name} {z} {limit}")
    return algorithm._replace(server=server._replace(update=update), noise=noise)
