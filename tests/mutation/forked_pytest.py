"""Runs tests on a copy of the package, for each line of input: JSON of a log, the copy's folder and the tests.

Each answer is pytest's exit status. What tests import besides the package is imported once, before each process forks.
"""

import gc
import json
import os
import sys

import dp_accounting  # noqa: F401
import flax.linen  # noqa: F401
import hypothesis  # noqa: F401
import jax  # noqa: F401
import optax  # noqa: F401
import pytest
import scipy.stats  # noqa: F401

gc.freeze()
for line in sys.stdin:
    log, folder, tests = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, folder)
        status = pytest.main(["-p", "xdist", "-q", "--tb=line", "--maxfail=1", *tests])
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
