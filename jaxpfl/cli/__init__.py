"""The command line, the only package that uses tyro; heavy imports happen once signals are watched."""

from __future__ import annotations

import sys

from jaxpfl import signals


def main(argv: list[str] | None = None) -> None:
    """Entry point of the ``jaxpfl`` command: `app.run` of the arguments.

    Args:
      argv: the arguments; None for this process's own, which Ctrl-C and SIGTERM then end in one line.
    """
    status: object = None
    if argv is None:
        signals.watch()
    try:
        from jaxpfl.cli.app import run

        run(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:
        status = stop.code
        raise
    except BaseException:
        status = 1
        raise
    finally:
        if argv is None:
            signals.finished(status if isinstance(status, int) else int(status is not None))
