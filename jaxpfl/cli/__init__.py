"""The command line. Only this package uses tyro, and it imports heavy packages after it has set up signal handling."""

from __future__ import annotations

import os
import sys

from jaxpfl.support import signals


def main(argv: list[str] | None = None) -> None:
    """Entry point of the ``jaxpfl`` command.

    Args:
      argv: arguments of the command. If None, the process's arguments are used, and Ctrl-C and SIGTERM end the process
        with a one-line message.
    """
    status: object = None
    if argv is None:
        signals.watch()
    given = sys.argv[1:] if argv is None else argv
    shared = any(argument.split("=")[0] == "--distributed" for argument in given)
    # Silence XLA's log, because `distributed` reports a lost process in one line. XLA reads the log level when JAX is
    # imported. Level 1 is not the user's choice: JAX itself sets it on import, and child processes inherit it.
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
