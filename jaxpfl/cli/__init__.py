"""The command line, the only package that uses tyro; heavy imports happen once signals are watched."""

from __future__ import annotations

import os
import sys

from jaxpfl.support import signals


def main(argv: list[str] | None = None) -> None:
    """Entry point of the ``jaxpfl`` command, which passes the arguments to `app.run`.

    Args:
      argv: the arguments; None for this process's own, which Ctrl-C and SIGTERM then end in one line.
    """
    status: object = None
    if argv is None:
        signals.watch()
    given = sys.argv[1:] if argv is None else argv
    shared = any(argument.split("=")[0] == "--distributed" for argument in given)
    # Before JAX is imported: `distributed` reports a lost process in one line, instead of XLA's log. Level 1 is JAX's
    # own, which processes that it starts inherit.
    if shared and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        from jaxpfl.cli.app import run

        run(given)
    except SystemExit as stop:
        status = stop.code
        raise
    except BaseException:
        status = 1
        raise
    finally:
        if argv is None:
            signals.finished(status if isinstance(status, int) else int(status is not None))
