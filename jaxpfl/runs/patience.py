"""Early stopping of a stored run, which a resumed one goes on with."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpfl.support import files, processes
from jaxpfl.engine import stopping
from jaxpfl.support.errors import JaxpflError
from jaxpfl.runs.setup import Experiment, require


class Patience:
    """Validation scores of one method so far, and the end of the patience with it.

    Args:
      experiment: the run.
      name: the method.
      records: of the run up to the round where it goes on.
      done: that round.

    Raises:
      JaxpflError: if the run's patience depends on evaluations whose records are lost.
    """

    def __init__(self, experiment: Experiment, name: str, records: files.Records, done: int):
        config, self._headline = experiment.config, experiment.headline
        self._patience, self._scores = config.patience, []
        if self._patience is None or done == require(config.rounds):
            return
        key = self._headline.validation

        def earlier() -> list[tuple[int, Any]]:
            own = [r for r in records.read() if r["kind"] == "evaluation" and r["method"] == name]
            return [(record["round"], record.get(key)) for record in own]

        found = dict(processes.on_first(earlier))
        for round in range(config.eval_every, done + 1, config.eval_every):
            if found.get(round) is None:
                raise JaxpflError(
                    f"{records.path} has lost the evaluation of {name} after round {round}, on which its patience "
                    "depends: start the run anew"
                )
            self.add({key: found[round]})

    def add(self, record: dict[str, Any]) -> None:
        """Add an evaluation's record."""
        if self._patience is not None:
            self._scores.append(np.asarray(record[self._headline.validation], float))

    @property
    def over(self) -> bool:
        """True once no seed has patience left."""
        if self._patience is None or not self._scores:
            return False
        return bool(stopping.chosen(np.stack(self._scores), self._patience, lower=self._headline.lower).over.all())
