"""Process of a benchmark: it builds what is measured, and then answers its parent's questions.

    python benchmarks/worker.py MODULE '{"settings": "as JSON"}'

``MODULE.work(settings)`` returns a `Contender`, which is timed on request, or a dictionary, which is the answer.
Questions and answers are lines of JSON. An exception is answered by ``{"error": one line}``. Only the standard library
is imported, because another interpreter may run this file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

if not __package__:
    import _script

    __package__ = _script.package


class Contender(NamedTuple):
    """Work to be timed.

    Attributes:
      run: function that runs the work of a number of rounds, and returns when it is done.
      facts: function that returns further results after the timings, such as accuracy, memory and device.
    """

    run: Callable[[int], None]
    facts: Callable[[], dict[str, Any]] = dict


def main() -> None:
    """Answer the parent's questions on standard input and output."""
    # Output of libraries must not mix with the answers, so it goes to standard error from here on.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")

    try:
        module = importlib.import_module(f".{sys.argv[1]}", __package__)
        result = module.work(json.loads(sys.argv[2]))
        if isinstance(result, dict):
            answer(result)
            return
        answer({"first": _seconds(result.run, 1)})
        for line in sys.stdin:
            rounds = json.loads(line)["rounds"]
            answer(_seconds(result.run, rounds) if rounds else result.facts())
    except Exception as error:
        if type(error).__name__ != "JaxpflError":  # these errors have one-line messages
            traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        answer({"error": f"{type(error).__name__}: {first}"})
        raise SystemExit(1) from None


def _seconds(run: Callable[[int], None], rounds: int) -> float:
    began = time.perf_counter()
    run(rounds)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
