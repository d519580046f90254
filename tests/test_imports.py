"""``import jaxpfl`` and a fit on one's own arrays need jax, flax, optax, chex and numpy, and nothing else.

So does a private one; dp-accounting is imported where its guarantee is asked for. (flax itself imports rich and yaml;
jaxpfl may not count on the others.)
"""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxpfl

SCRIPT = """
import sys
for name in ("orbax", "sklearn", "matplotlib", "tyro", "tensorflow_datasets", "dp_accounting", "pandas"):
    sys.modules[name] = None  # an import of it raises ImportError
import numpy as np
import jaxpfl, jaxpfl.privacy

rng = np.random.default_rng(0)
clients, test = ([(rng.normal(size=(6, 4)), rng.integers(2, size=6)) for _ in range(3)] for _ in range(2))
federation = jaxpfl.stack_clients(clients, test=test)
given = {"model": "linear", "rounds": 1, "local_steps": 1, "batch_size": 3}
given["plan"] = jaxpfl.ExecutionPlan(clients="map", runs="map")  # its programs compile in half the time
result = jaxpfl.fit("local", federation, **given)
assert result.personalized_accuracy.shape == (1, 3)

mechanism = jaxpfl.privacy.Mechanism(1.0, 1.0)
private = jaxpfl.fit("fedavg", federation, **given, privacy=mechanism)
assert private.personalized_accuracy.shape == (1, 3)
del sys.modules["dp_accounting"]  # what is claimed of it is dp-accounting's to say, and needs none of the others
assert private.statement(1e-3).epsilon > 0
assert jaxpfl.load_sweep  # pandas is imported when it is called
"""


@pytest.mark.slow
def test_a_fit_needs_the_five_packages_only():
    subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], check=True)


def test_no_public_name_is_a_module_of_that_name():
    assert [name for name in jaxpfl.__all__ if isinstance(getattr(jaxpfl, name), ModuleType)] == []


def test_a_notebook_keeps_its_own_way_of_drawing():
    """Pictures are `Figure` objects: pyplot, and the choice of its backend, belong to the caller of the package."""
    texts = {path: path.read_text() for path in sorted(Path(jaxpfl.__file__).parent.rglob("*.py"))}
    assert not [path for path, text in texts.items() if "pyplot" in text or "matplotlib.use(" in text]
