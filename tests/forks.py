"""Processes of their own without the seconds of their imports: forks of one that has imported the package.

As a script, it forks for each line of its input, or tells how a fork has ended. No backend of JAX starts in it, but
JAX's settings are those with which it began.
"""

import functools
import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

COMMAND = "from jaxpfl.cli import main; main()"
PACKAGES = ("cli", "engine", "runs", "studies")
LIBRARIES = ("orbax.checkpoint", "matplotlib.pyplot", "pandas", "pyarrow.parquet", "scipy.stats", "sklearn.datasets")


def load() -> None:
    """Import all that a command may."""
    for name in PACKAGES:
        package = importlib.import_module(f"jaxpfl.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in LIBRARIES:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()


class Forked:
    """A process that runs code, a command of jaxpfl unless given: what the tests use of `subprocess.Popen`."""

    def __init__(self, *arguments: object, code: str = COMMAND, place: Path | None = None, **env: str):
        self._own = tempfile.TemporaryDirectory()
        self._files = [(place or Path(self._own.name)) / name for name in ("out", "err")]
        self.returncode: int | None = None
        files, environ = [str(file) for file in self._files], {**os.environ, **env}
        argv = ["jaxpfl", *map(str, arguments)]
        self.pid: int = _asked({"argv": argv, "code": code, "files": files, "env": environ, "cwd": os.getcwd()})

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _asked({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("jaxpfl", timeout)
            time.sleep(0.01)
        return status

    def communicate(self, timeout: float = 600.0) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (file.read_text(errors="replace") for file in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def script(path: Path) -> str:
    """Code that runs a file as a script."""
    return (
        f"import runpy, sys; sys.path.insert(0, {str(path.parent)!r}); runpy.run_path({str(path)!r}, {{}}, '__main__')"
    )


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)


def _asked(request: dict[str, Any]) -> Any:
    server = _server()
    print(json.dumps(request), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def run(request: dict[str, Any]) -> None:
    """Run code in this process, which was forked for it, and which ends as every script does."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(request["files"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    exec(request["code"], {"__name__": "__main__"})


def main() -> None:
    load()
    for line in sys.stdin:
        request = json.loads(line)
        if pid := request.get("pid"):
            ended, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif not (answer := os.fork()):
            return run(request)
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    main()
