"""MAP personalization with the knowledge-distillation prior.

Options replace the distance of the prior, or use the exact normalizer of its density.

Reference: Ozkara et al. 2023, "A Statistical Framework for Personalized Federated Learning and Estimation",
https://openreview.net/forum?id=FUiDMCr_W4o.
"""

from __future__ import annotations

from flax import struct

from jaxpfl.algorithms.map_personalization import MapHyper, map_personalization
from jaxpfl.algorithms.parts.hyper import hyper
from jaxpfl.algorithms.parts.local_work import LocalWork
from jaxpfl.core.protocol import Algorithm
from jaxpfl.core.types import Scalar
from jaxpfl.models import Task
from jaxpfl.priors import Prior, distillation


@struct.dataclass
class MapDistillationHyper(MapHyper):
    """Hyper-parameters of `map_kd`; weight decay applies to the personal models theta and the global model mu."""

    lr_location: Scalar = hyper(
        0.1, "learning rate of the global model; decays as lr does", high=1.0, is_step=True, decays=True
    )
    lr_scale: Scalar = hyper(0.05, "learning rate of psi; not decayed", high=1.0, is_step=True)
    scale_init: Scalar = hyper(3.5, "initial psi, the clients' spread; larger values distill less", positive=True)
    scale_floor: Scalar = hyper(1.0, "smallest psi", positive=True, paper=0.5)
    c: Scalar = hyper(1.0, "factor on the divergence in psi's step; 1 gives the prior's gradient")


def map_kd(
    task: Task, work: LocalWork, *, distance: str = "kd", exact: bool = False, scaling: str = "mean"
) -> Algorithm:
    """MAP personalization with a prior on predictions: theta_i is regularized toward the global model's predictions.

    This method and `adaped` are the same if both have their default options and equal hyper-parameters, such as c, the
    constant in the gradient of the prior's scale psi. `priors.distillation` defines the prior's density and its
    normalizer. The personalized model is the client's own theta_i. The global model is mu.

    Args:
      task, work: task and local work, as in `map_personalization`.
      distance: distance between the predictions p of mu and q of theta: kd for KL(p || q), reversed-kd for KL(q || p),
        square for |p - q|^2.
      exact: whether to use the exact normalizer of the prior's density instead of the paper's term log(2 psi) / 2; only
        for kd.
      scaling: definition of a client's loss f_i: the "sum" of its examples' losses or, as in AdaPeD, their "mean".

    Raises:
      JaxpflError: if the distance or the scaling is unknown, ``exact`` is set with a distance other than kd, or the
        task defines no distance between predictions. An error is also raised if ``exact`` or the distance square is set
        although predictions are not class probabilities.
    """

    distillation.check_task("map-kd", task)

    def prior(hp: MapDistillationHyper) -> Prior:
        rates = {"psi_init": hp.scale_init, "floor": hp.scale_floor, "c": hp.c, "weight_decay": hp.weight_decay}
        return distillation.prior(**rates, distance=distance, exact=exact, own=task.divergence)

    prior(MapDistillationHyper())  # raises errors about the options before anything is compiled
    return map_personalization(task, work, prior=prior, scaling=scaling, each=2)  # gradients of theta's and mu's steps
