"""A federation of real processes on the loopback: one SuperLink and SuperNodes, with a time limit on everything."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def process(args: list[str], log: Path, env: dict[str, str]):
    """A process in a group of its own, which is killed as a whole at the end."""
    with open(log, "wb") as file:
        started = subprocess.Popen(args, stdout=file, stderr=file, env=env, cwd=log.parent, start_new_session=True)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def federation(app: Path, folder: Path, clients: int, seconds: float, **config: object) -> str:
    """Run an app with one node for each client; return the run's log."""
    folder.mkdir(parents=True, exist_ok=True)
    api, *ports = free_ports(clients + 1)
    env = os.environ | {"FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
    env |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    (folder / "flwr").mkdir(exist_ok=True)
    connection = f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{api}"\ninsecure = true\n'
    (folder / "flwr" / "config.toml").write_text(connection)
    until = time.monotonic() + seconds
    with ExitStack() as stack:
        link = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--host", "127.0.0.1"]
        given = [str(BIN / link[0]), *link[1:], "--port", str(api)]
        stack.enter_context(process(given, folder / "superlink.log", env))
        for client, port in enumerate(ports):
            own = f"partition-id={client} folder='{folder / f'node{client}'}' data='{app / 'clients'}'"
            node = ["--insecure", "--superlink", f"127.0.0.1:{api}", "--host", "127.0.0.1", "--port", str(port)]
            args = [str(BIN / "flower-supernode"), *node, "--node-config", own]
            stack.enter_context(process(args, folder / f"node{client}.log", env))
        while socket.socket().connect_ex(("127.0.0.1", api)):
            assert time.monotonic() < until, (folder / "superlink.log").read_text()
            time.sleep(0.5)
        values = " ".join(f"{name.replace('_', '-')}={value}" for name, value in config.items())
        args = [str(BIN / "flwr"), "run", str(app), "local", "--stream", "--run-config", values]
        with process(args, folder / "run.log", env) as run:
            run.wait(max(until - time.monotonic(), 1))
    return (folder / "run.log").read_text()
