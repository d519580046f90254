"""AdaPeD on MNIST in the paper's setting, within its spread, by one seed.

Over three seeds the mean was 98.16 and 98.43 in two runs that differ in rounding only (standard deviation over seeds
0.2 to 0.3). The bound lies three of these deviations below the lower run: a sound version fails in about one run of a
thousand.
"""

import os
from pathlib import Path

import pytest

import jaxpfl

DATA = os.environ.get("JAXPFL_DATA_DIR")


@pytest.mark.slow
@pytest.mark.skipif(
    not DATA or not (Path(DATA) / "mnist").is_dir(), reason="needs MNIST: set JAXPFL_DATA_DIR to a folder that holds it"
)
def test_the_papers_setting():
    federation = jaxpfl.federate(jaxpfl.load("mnist", DATA), clients=50, classes_per_client=3)
    result = jaxpfl.fit("adaped", federation, model="cnn", rounds=300, cohort=5, local_steps=10, batch_size=20, seeds=1)
    assert result.personalized_accuracy.mean() > 0.972
    assert (result.history["psi"][:, -20:].mean(axis=1) < 1).all()  # from 3.5 to near its floor
