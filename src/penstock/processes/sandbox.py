"""What runners give up before they load a job's code, where the operator asks for it.

Without being asked a runner is as any process of its user: it can read the user's files, and what keys lie there. In
the sandbox

- it gains no privileges by what it runs (`no_new_privs`: set-user-id programs are plain ones), has none of root's
  capabilities (as root it reads root's files, and no other user's by force), and leaves no core dump;
- it is in a Landlock domain: it cannot trace processes outside it or read their memory, nor (Linux 6.12) signal them or
  reach their abstract sockets. `write` and `read` say beneath which folders it writes and reads;
- it has as much memory of its own, and as many processes, as are allowed;
- as another user it cannot read the service's files either. That takes root, a Python that this user can read, and TCP:
  the folder of Unix sockets is closed to that user, and so is shared memory, which goes to processes of one user.

What is not possible on this host is said by `check`, before anything is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import resource
import signal
import site
import struct
import sys

import msgspec

from penstock.core.errors import InvalidArgumentError
from penstock.processes import landlock
from penstock.wire.addresses import Listening

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
CAPABILITIES_HEADER = struct.pack("=Ii", 0x20080522, 0)  # the version with 64 of them; this thread's
NO_CAPABILITIES = bytes(24)  # effective, permitted, inheritable; twice, 32 of them each
MAX_PROCESSES = 4096  # of one user: more than any job's threads, less than what stops a host
RUNNERS_FOLDER = "runners"  # of sockets, in the service's: the dispatcher's own socket is out of reach
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/dev", "/run/systemd/resolve")
"""What any program reads: libraries, time zones, certificates, how names are resolved, what the machine has."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts")
IMPORTED = ("json", "numpy", "zmq", "msgspec", "cloudpickle", "pyarrow", "penstock")
"""What runners import, the standard library first: all of it has to be readable for who they run as."""


class Sandbox(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    user: str = ""
    """Whom runners run as; empty: who started them."""
    write: tuple[str, ...] | None = None
    """The folders they write to; None: wherever their user may."""
    read: tuple[str, ...] | None = None
    """The folders they read, beside those they write to, Python's and the system's; None: what their user may."""
    memory_bytes: int | None = None
    """How much memory of its own each has at most; None: as much as there is."""

    def check(self, listening: Listening) -> str:
        """Return what it does and what it does not, for people; raise for what is not possible here."""
        has_landlock = landlock.version()
        if (self.write, self.read) != (None, None) and not has_landlock:
            raise InvalidArgumentError(
                "sandbox: this kernel has no Landlock, so where jobs read and write cannot be limited; leave out "
                "--sandbox-write and --sandbox-read, or run workers in containers"
            )
        for path in (*(self.write or ()), *(self.read or ())):
            if not os.path.exists(path):
                raise InvalidArgumentError(f"sandbox: {path!r} is not there; make it before workers start")
        said = ["runners have no capabilities, gain no privileges and leave no core dumps"]
        said.append(self._said_of_processes(has_landlock))
        if self.write is not None:
            said.append(f"they write to {_listed(self.write)}")
        if self.read is not None:
            said.append(f"they read {_listed(self.read)}, what they write, and what Python and the system need")
        if self.memory_bytes is not None:
            said.append(f"each has at most {self.memory_bytes:,} bytes of memory of its own")
        if self.user:
            self._check_user(listening)
            said.append(f"they run as {self.user!r}, who gets no shared memory: batches go through sockets, encrypted")
        elif self.read is None:
            said.append(
                "they can read what this user can: as root, and reached by TCP, they can run as another (--sandbox "
                "USER), and --sandbox-read says what they read"
            )
        return "; ".join(said)

    @staticmethod
    def _said_of_processes(has_landlock: int) -> str:
        if not has_landlock:
            return "this kernel has no Landlock: they can trace and signal other processes of their user"
        if has_landlock < landlock.SCOPES_SINCE:
            return "they cannot trace processes outside, or read their memory; this kernel lets them signal those"
        return "they cannot trace or signal processes outside, or read their memory"

    def _check_user(self, listening: Listening) -> None:
        if os.geteuid() != 0:
            raise InvalidArgumentError(f"sandbox user={self.user!r}: only root can run processes as another user")
        if listening.unix:
            raise InvalidArgumentError(
                f"sandbox user={self.user!r}: that user cannot enter the folder of Unix sockets; be reached by TCP "
                "(--bind, --keys)"
            )
        self._identity()
        for name in IMPORTED:
            spec = importlib.util.find_spec(name)
            path = None if spec is None else spec.origin
            if path is not None and not self.reads(path):
                raise InvalidArgumentError(
                    f"sandbox user={self.user!r}: that user cannot read {path} ({_closed_part(path, self)}), which "
                    "runners import; install Python and penstock where all users can read them: `/usr/bin/python3 -m "
                    "venv /opt/penstock` is such a place"
                )

    def _identity(self) -> pwd.struct_passwd:
        try:
            return pwd.getpwnam(self.user)
        except KeyError:
            raise InvalidArgumentError(f"sandbox user={self.user!r} is no user of this host") from None

    def reads(self, path: str, mode: int = os.R_OK) -> bool:
        """Whether the user may do that with a file or folder."""
        pid = os.fork()
        if pid == 0:
            try:
                self._become()
                os._exit(0 if os.access(path, mode) else 1)
            finally:
                os._exit(1)
        return os.waitpid(pid, 0)[1] == 0

    def _become(self) -> None:
        whom = self._identity()
        os.initgroups(whom.pw_name, whom.pw_gid)
        os.setresgid(whom.pw_gid, whom.pw_gid, whom.pw_gid)
        os.setresuid(whom.pw_uid, whom.pw_uid, whom.pw_uid)
        os.environ.update(HOME=whom.pw_dir, USER=whom.pw_name, LOGNAME=whom.pw_name)
        try:
            os.chdir(whom.pw_dir)
        except OSError:
            os.chdir("/")

    def enter(self, listening: Listening) -> Listening:
        """Give up what is to be given up, for good; return where to listen.

        Before there are threads, and before a job's code is loaded.
        """
        parent = os.getppid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))
        if listening.unix:
            listening = msgspec.structs.replace(listening, folder=os.path.join(listening.folder, RUNNERS_FOLDER))
            with contextlib.suppress(FileExistsError):
                os.mkdir(listening.folder, 0o700)
        libc = ctypes.CDLL(None, use_errno=True)
        if self.user:
            self._become()
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = MAX_PROCESSES if hard == resource.RLIM_INFINITY else min(MAX_PROCESSES, hard)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            # The kernel forgets it with the user: without it a runner would outlive a nursery that was killed.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this kernel does not keep processes from new privileges")
        # Before Landlock: with root's capabilities a process reads others' memory whatever its domain is.
        if libc.capset(CAPABILITIES_HEADER, NO_CAPABILITIES) != 0:
            raise OSError(ctypes.get_errno(), "capabilities cannot be given up here")
        if landlock.version():
            self._restrict(listening)
        return listening

    def _restrict(self, listening: Listening) -> None:
        handled, rules = 0, []
        if self.write is not None:
            handled |= landlock.WRITE
            rules += [(path, landlock.WRITE) for path in (*self.write, *DEVICES)]
            if listening.unix:
                rules.append((listening.folder, landlock.LISTEN))
        if self.read is not None:
            handled |= landlock.READ
            rules += [(path, landlock.READ) for path in (*self.read, *(self.write or ()), *SYSTEM, *_of_python())]
        landlock.restrict(handled, rules)


def _of_python() -> list[str]:
    """Return where modules lie that are installed. Not `sys.path`: a folder somebody works in may be part of it."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.prefix, sys.base_prefix, *site.getsitepackages(), ours]


def _closed_part(path: str, sandbox: Sandbox) -> str:
    """Say at which folder of a path the user is stopped."""
    parts = os.path.abspath(path).split(os.sep)
    for end in range(2, len(parts)):
        folder = os.sep.join(parts[:end])
        if not sandbox.reads(folder, os.X_OK):
            return f"{folder} is closed to it"
    return "its mode does not allow it"


def _listed(paths: tuple[str, ...]) -> str:
    return " and ".join(paths) if paths else "nothing"
