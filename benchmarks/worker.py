"""One process of a benchmark: builds what is measured, then answers its parent's questions.

    python benchmarks/worker.py MODULE '{"settings": "as JSON"}'

``MODULE.work(settings)`` returns a `Contender`, which stays and is timed when asked, or a dictionary, which is the
answer. Questions and answers are lines of JSON; an exception is the answer ``{"error": one line}``. Imports nothing
but the standard library: another interpreter may run it.
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
      run: ``run(rounds)`` returns when the work of that many rounds is done.
      facts: what else there is to say after the timings: accuracy, memory, device.
    """

    run: Callable[[int], None]
    facts: Callable[[], dict[str, Any]] = dict


def main() -> None:
    """Serves the parent on standard input and output."""
    # What libraries print must not mix with the answers: from here on it goes to standard error.
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
        if type(error).__name__ != "JaxpflError":  # those say all in one line
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
