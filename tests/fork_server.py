"""
Start processes quickly, by forking a warm Python that has already imported torch and this project.

A cold `python train.py` spends three seconds on imports, and the tests start about a hundred
processes. The server below imports once. For each request it forks a child, and the child then does
what a fresh Python would do: it runs the script, or the code given with -c, as __main__. So the
child is a real process with its own signals, pipes and exit code, ready after some 20 ms. A second
server, forked from the first before the first imports the project, has imported only torch.

A forked child cannot show anything about importing itself, environment variables that torch reads
when it is imported, or Python's own options. Start a cold process for those. Nor does a child show
how Python tears down its modules at exit, which takes a quarter of a second, unless WHOLE_END is in
its environment.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# -----------------------------------------------------------------------------
# The tests' side


class Server:
    """Start the warm processes and send them requests. They end when the tests do."""

    def __init__(self) -> None:
        self.project, project = socket.socketpair()
        self.torch, torch = socket.socketpair()
        files = [project.fileno(), torch.fileno()]
        with project, torch:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *map(str, files)],
                pass_fds=files,
                # one thread for each process: with more, models this small only wait
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def send(self, files: list[int], only_torch: bool) -> None:
        socket.send_fds(self.torch if only_torch else self.project, [b"!"], files)


@functools.cache
def server() -> Server:
    return Server()


class ForkedProcess:
    """
    Start a child of the server, used like a subprocess.Popen in text mode with pipes for stdout and
    stderr; with an `output` file, both go there, and stdin is an unbuffered pipe.
    """

    def __init__(
        self,
        arguments: list[str],
        cwd: Path,
        environment: dict[str, str],
        only_torch: bool,
        output=None,
    ) -> None:
        self.args, self.returncode = arguments, None
        self.connection, theirs = socket.socketpair()
        if output:
            child_in, stdin = os.pipe()
            files = [os.dup(output.fileno()), os.dup(output.fileno()), child_in]
            self.stdin = open(stdin, "wb", buffering=0)
        else:
            out, child_out = os.pipe()
            err, child_err = os.pipe()
            files = [child_out, child_err]
            self.stdout = open(out, encoding="utf-8")
            self.stderr = open(err, encoding="utf-8")
        server().send([theirs.fileno(), *files], only_torch)
        theirs.close()
        for file in files:
            os.close(file)
        # the pid arrives first, the exit code when the process has ended
        self.replies = self.connection.makefile("r")
        request = dict(arguments=arguments, cwd=str(cwd), environment=environment)
        self.connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = int(self.replies.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended, _, _ = select.select([self.connection], [], [], timeout)
            if not ended:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self.replies.readline())
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes, in two threads so that neither fills up, and wait for the child."""
        readers = ThreadPoolExecutor(2)
        texts = [readers.submit(file.read) for file in (self.stdout, self.stderr)]
        readers.shutdown(wait=False)
        if wait(texts, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        out, err = (text.result() for text in texts)
        self.stdout.close()
        self.stderr.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -----------------------------------------------------------------------------
# The server's side


def serve(control: socket.socket) -> dict | None:
    """
    Fork a handler for each request, which forks the child and waits for it to end. Returns the
    request in the child, and None in the server once the tests have ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the handlers
    gc.collect()
    gc.freeze()  # or each child would go through a million objects as it ends
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, 4)
        if not message:
            return None
        if os.fork() == 0:
            control.close()
            return handle(*files)
        for file in files:
            os.close(file)


def handle(connection_file: int, out: int, err: int, *stdin: int) -> dict:
    """Fork the child, in which this function returns, and send the tests its pid and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection = socket.socket(fileno=connection_file)
    request = json.loads(connection.makefile("r").readline())
    child = os.fork()
    if child == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        for file in stdin:
            os.dup2(file, 0)
        for file in (out, err, *stdin):
            os.close(file)
        connection.close()
        return request
    # only the child may hold the pipes, or their readers would never see the end
    for file in (out, err, *stdin):
        os.close(file)
    with contextlib.suppress(OSError):  # the tests may be gone
        connection.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def console(file: int, errors: str) -> io.TextIOWrapper:
    """Open stdout or stderr as Python does with PYTHONUNBUFFERED=1."""
    return io.TextIOWrapper(open(file, "wb", 0), "utf-8", errors, write_through=True)


def run(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Do in the child what `python ARGUMENTS` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python itself sets it
    for name in ("SIGTERM", "SIGHUP", "SIGCHLD"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules.pop("common.environment", None)  # it sets variables when it is imported
    os.chdir(cwd)
    sys.stdout, sys.stderr = console(1, "strict"), console(2, "backslashreplace")
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    code = 0
    try:
        if arguments[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit:
        code = exit.code or 0
        if not isinstance(code, int):
            raise
    except KeyboardInterrupt:  # Python then kills itself, which a shell calls 130
        code = 130
    if "WHOLE_END" in environment:
        sys.exit(code)
    # what Python does at exit, except for freeing a million objects
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code)


def import_project() -> None:
    for module in ("bench", "convert", "sample", "train"):
        importlib.import_module(module)


def main(project: int, torch: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    sys.path[0] = str(ROOT)
    importlib.import_module("torch._dynamo")  # which torch imports with the first optimizer
    os.fsync = lambda file: None  # as in conftest.py
    mine, other = (torch, project) if os.fork() == 0 else (project, torch)
    os.close(other)
    if mine == project:
        import_project()
    if request := serve(socket.socket(fileno=mine)):
        run(**request)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
