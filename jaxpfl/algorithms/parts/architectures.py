"""Personal models of other architectures than the global one, for methods that compare only logits."""

from __future__ import annotations

from jaxpfl.models import Task, build_model


def personal_tasks(task: Task, architectures: str) -> list[Task]:
    """Tasks of groups of clients with different personal models; clients are assigned in turn by their ids.

    Args:
      task: that of the global model.
      architectures: names of models joined by "+", such as ``"same+mlp:32"``; "same" is the task's own, and "" is one
        group of it.

    Raises:
      JaxpflError: for an unknown model.
    """

    def named(name: str) -> Task:
        if name == "same":
            return task
        every = task.counted is not None
        return task._replace(model=build_model(name, task.num_classes, task.input_shape, every=every))

    return [named(name) for name in (architectures.split("+") if architectures else ["same"])]
