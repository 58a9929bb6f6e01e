"""
A Windows that is not there: Linux without what Windows lacks, and with what Windows enforces.

For this project's code, its tests included: sys.platform is "win32", os.name is "nt", POSIX
modules, functions and signals are missing, folders cannot be opened, msvcrt and ctypes.windll are
there. For every library too: text files are cp1252 with CRLF unless the caller says otherwise, and
what any process of this Windows has open or mapped can be neither deleted nor replaced. README.md
beside this file says how to use it and what it cannot show.
"""

import builtins
import contextlib
import errno
import functools
import importlib
import inspect
import io
import os
import struct
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))  # the code in here sees Windows

MISSING_MODULES = set("fcntl resource termios tty pty pwd grp readline syslog curses".split())
MISSING = dict(
    os="fork forkpty getuid geteuid getgid getpgid killpg setsid uname statvfs mkfifo openpty "
    "login_tty ttyname sched_getaffinity sched_setaffinity getloadavg nice chown posix_spawn "
    "sysconf confstr pread pwrite WNOHANG waitid O_DIRECTORY O_NOFOLLOW O_SYNC ST_NOEXEC",
    signal="SIGHUP SIGQUIT SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD SIGSTOP SIGCONT SIGTSTP "
    "SIGXCPU SIGXFSZ alarm setitimer pause pthread_sigmask pthread_kill sigwait siginterrupt",
    time="clock_gettime clock_getres CLOCK_BOOTTIME CLOCK_MONOTONIC CLOCK_REALTIME tzset",
    select="poll epoll",
    socket="AF_UNIX send_fds recv_fds",
)
real_import, real_import_module = builtins.__import__, importlib.import_module
real_open, SIGNATURE = io.open, inspect.signature(io.open)
SIGBREAK = 21  # Linux's SIGTTIN
F_OFD_SETLK = 37  # from <fcntl.h>: locks owned by the open file, as on Windows


def open_files(pid: str) -> list[os.stat_result]:
    """List a process's open files. Raises OSError if it has ended or is another user's."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the process may have closed it since
            found.append(os.stat(f"/proc/{pid}/fd/{fd}"))
    return found


def holders(path) -> list[str]:
    """List this Windows' processes that have the file open or mapped, under any of its names."""
    if not os.path.isfile(path):
        return []
    wanted, badge, found = os.stat(path), os.stat(__file__), []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            files = open_files(pid)
            if not any(os.path.samestat(file, badge) for file in files):
                continue
            if any(os.path.samestat(file, wanted) for file in files):
                found.append(f"process {pid} has it open")
            with real_open(f"/proc/{pid}/maps", "rb") as file:
                inode = str(wanted.st_ino).encode()
                if any(line.split(None, 5)[4] == inode for line in file if b"/" in line):
                    found.append(f"process {pid} has it mapped")
    return found


def refuse(path, code: str) -> None:
    if by := "; ".join(holders(path)):
        raise PermissionError(errno.EACCES, f"{code} ({by})", str(path))


def guard_files() -> None:
    """
    Make os.remove, os.replace and os.rename refuse files that are in use, for every caller, pathlib
    and shutil included.
    """

    def deleting(real):
        @functools.wraps(real)
        def remove(path, *, dir_fd=None):
            if dir_fd is None:
                refuse(path, "[WinError 32] in use by another process")
            return real(path, dir_fd=dir_fd)

        return remove

    def moving(real, replaces: bool):
        @functools.wraps(real)
        def move(src, dst, **fds):
            refuse(src, "[WinError 32] in use by another process")
            if not replaces and os.path.exists(dst):
                raise FileExistsError(errno.EEXIST, "[WinError 183] exists already", str(dst))
            refuse(dst, "[WinError 5] Access is denied")
            return real(src, dst, **fds)

        return move

    os.remove, os.unlink = deleting(os.remove), deleting(os.unlink)
    os.replace, os.rename = moving(os.replace, True), moving(os.rename, False)


def windows_open(*given, **named):
    """Open a file with Windows' default encoding and line ends; folders cannot be opened."""
    call = SIGNATURE.bind(*given, **named)
    call.apply_defaults()
    a = call.arguments
    if a["opener"] is None and not isinstance(a["file"], int) and os.path.isdir(a["file"]):
        raise PermissionError(errno.EACCES, "Permission denied", str(a["file"]))
    if "b" not in a["mode"]:
        a["encoding"] = "cp1252" if a["encoding"] in (None, "locale") else a["encoding"]
        if a["newline"] is None and "r" not in a["mode"] and "+" not in a["mode"]:
            a["newline"] = "\r\n"
    return real_open(*call.args, **call.kwargs)


# -----------------------------------------------------------------------------
# Modules as they are on Windows


class Stand(types.ModuleType):
    """Show a module as Windows has it: without `missing` names, and with `own` replacements."""

    def __init__(self, real, missing: str = "", **own):
        super().__init__(real.__name__)
        self.__dict__.update(own, _real=real, _missing=set(missing.split()) - own.keys())
        self.__dict__["_before"] = {}  # values from before pytest's monkeypatch

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(f"module '{self._real.__name__}' has no attribute '{name}'")
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            self._before.setdefault(name, getattr(self._real, name, None))
            setattr(self._real, name, value)

    def __delattr__(self, name):
        if name in self._before:
            setattr(self._real, name, self._before.pop(name))


class Recorder:
    """Stand in for windll: every function returns 1, and its arguments are kept in `calls`."""

    calls: list[tuple] = []

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return 1


def no_folder_open(path, *arguments, **named):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, *arguments, **named)


def kill(pid: int, number: int) -> None:
    """Windows knows two console events; any other number ends the process at once."""
    if pid == os.getpid():
        raise AssertionError(f"os.kill(os.getpid(), {number}) ends this process on Windows")
    os.kill(pid, {0: 2, 1: SIGBREAK}.get(number, 9))


def handle(number: int, handler):
    import signal

    if number not in {2, 4, 6, 8, 11, 15, SIGBREAK}:
        raise ValueError("invalid signal value")
    return signal.signal(number, handler)


def only_sockets(*files_and_timeout):
    import socket

    files = [file for group in files_and_timeout[:3] for file in group]
    if not all(isinstance(file, (int, socket.socket)) for file in files):
        raise OSError(10038, "[WinError 10038] not a socket")
    return importlib.import_module("select").select(*files_and_timeout)


def lock_region(file: int, mode: int, size: int) -> None:
    """
    Lock `size` bytes from the file's position for this handle alone, as msvcrt.locking() does.
    """
    fcntl = importlib.import_module("fcntl")
    kind = fcntl.F_UNLCK if mode == 0 else fcntl.F_WRLCK
    region = struct.pack("hhqqi4x", kind, os.SEEK_SET, os.lseek(file, 0, os.SEEK_CUR), size, 0)
    try:
        fcntl.fcntl(file, F_OFD_SETLK, region)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


@functools.cache
def stand_for(name: str):
    own = dict(
        sys=dict(platform="win32"),
        os=dict(name="nt", open=no_folder_open, kill=kill),
        signal=dict(signal=handle, SIGBREAK=SIGBREAK, CTRL_C_EVENT=0, CTRL_BREAK_EVENT=1),
        platform=dict(
            system=lambda: "Windows",
            release=lambda: "10",
            processor=lambda: "Intel64 Family 6 Model 151 Stepping 2, GenuineIntel",
            libc_ver=lambda *_: ("", ""),
        ),
        select=dict(select=only_sockets),
        ctypes=dict(CDLL=os.fspath, windll=Recorder(), WinDLL=Recorder),  # no CDLL(None)
        msvcrt=dict(LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2, LK_RLCK=3, LK_NBRLCK=4, locking=lock_region),
    )
    real = types.ModuleType(name) if name == "msvcrt" else importlib.import_module(name)
    return Stand(real, MISSING.get(name, ""), **own.get(name, {}))


def windows_import(name, globals=None, locals=None, fromlist=(), level=0):
    """Import a module as __import__ does, but give this project's files Windows' modules."""
    file, top = (globals or {}).get("__file__"), name.partition(".")[0]
    file = os.path.abspath(file) if file else ""
    ours = file.startswith(ROOT + "/") and not file.startswith(HERE + "/")
    ours = ours and "/site-packages/" not in file and not level
    if ours and top in MISSING_MODULES:
        raise ModuleNotFoundError(f"No module named '{top}'", name=top)
    if ours and name == "msvcrt":
        return stand_for(name)
    found = real_import(name, globals, locals, fromlist, level)
    stands = top in {*MISSING, "sys", "platform", "ctypes"} and (name == top or not fromlist)
    return stand_for(top) if ours and stands else found


def import_module(name: str, package: str | None = None):
    """Import a module as importlib does; pytest.importorskip() calls this."""
    if name in MISSING_MODULES and sys._getframe(1).f_code.co_name == "importorskip":
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)
    return real_import_module(name, package)


def install() -> None:
    os.environ.update(NOTWINDOWS="1", PYTHONPATH=HERE)  # for child processes
    os.open(__file__, os.O_RDONLY)  # an open file by which holders() recognises this process
    importlib.import_module = import_module
    guard_files()
    builtins.__import__ = windows_import
    builtins.open = io.open = windows_open
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if stream is not None and not stream.isatty():  # a console takes all of Unicode
            stream.reconfigure(encoding="cp1252", errors=errors, newline="\r\n")
    import multiprocessing

    multiprocessing.set_start_method("spawn", force=True)
