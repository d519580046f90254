"""The engine: compiled programs that train and score all clients and all runs."""

from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.fit import Fit
from jaxpfl.engine.placement import use_cpu_cores
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.state import RunState

__all__ = ["ExecutionPlan", "Fit", "RunState", "Simulation", "use_cpu_cores"]
