"""Run commands of jaxpfl one after the other in this process, and say what it holds after each.

Reads a list of commands, as JSON, from each line of standard input, and answers with an object: the status, what was
said on standard error, and `held`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

from jaxpfl.cli import main as command


def held(process: int | str = "self") -> dict[str, float]:
    """Resident memory of a process in MiB, its open file handles, its threads and its memory mappings."""
    of = Path("/proc") / str(process)
    pages = int((of / "statm").read_text().split()[1])
    resident = pages * resource.getpagesize() / 2**20
    return {
        "resident": round(resident, 1),
        "handles": len(os.listdir(of / "fd")),
        "threads": len(os.listdir(of / "task")),
        "mappings": (of / "maps").read_bytes().count(b"\n"),
    }


def held_here() -> dict[str, float]:
    """`held`, the files in the folder of temporary ones and in that of compiled programs, and programs in memory."""
    from jaxpfl.engine import compiled

    gc.collect()
    folders = {"temporary": Path(tempfile.gettempdir()), "cached": Path(os.environ["XDG_CACHE_HOME"])}
    files = {name: sum(path.is_file() for path in folder.rglob("*")) for name, folder in folders.items()}
    return held() | files | {"programs": len(compiled._kept)}


def run(argv: list[str]) -> tuple[int, str]:
    """Status of a command, and its standard error."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            command(argv)
        except SystemExit as stop:
            return (stop.code if isinstance(stop.code, int) else int(stop.code is not None)), err.getvalue()
        except BaseException:
            traceback.print_exc()
            return 1, err.getvalue()
    return 0, err.getvalue()


def main() -> None:
    for line in sys.stdin:
        status, said = 0, ""
        for argv in json.loads(line):
            status, said = run(argv)
            if status:
                break
        print(json.dumps({"status": status, "said": said} | held_here()), flush=True)


if __name__ == "__main__":
    main()
