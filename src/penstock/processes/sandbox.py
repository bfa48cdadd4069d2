"""What runners give up before they load a job's code, where the operator asks for it.

Without being asked a runner is as any process of its user: it can read the user's files, and what keys lie there. In
the sandbox it gains no privileges by what it runs (`no_new_privs`: set-user-id programs are plain ones), leaves no core
dump, and has a number of processes and threads it may have at most. As another user it cannot read the service's files
either. That takes root, and TCP: the folder of Unix sockets is closed to that user, and so is shared memory, which only
goes to processes of one user.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource

import msgspec

from penstock.core.errors import InvalidArgumentError
from penstock.wire.addresses import Listening

PR_SET_NO_NEW_PRIVS = 38
MAX_PROCESSES = 4096  # of one user: more than any job's threads, less than what stops a host


class Sandbox(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    user: str = ""
    """Whom runners run as; empty: who started them."""

    def check(self, listening: Listening) -> str:
        """Return what it does and what it does not, for people; raise for what is not possible here."""
        if not self.user:
            return (
                "runners gain no privileges and leave no core dumps; they can read what this user can: as root, and "
                "reached by TCP, they can run as another (--sandbox USER)"
            )
        if os.geteuid() != 0:
            raise InvalidArgumentError(f"sandbox user={self.user!r}: only root can run processes as another user")
        if listening.unix:
            raise InvalidArgumentError(
                f"sandbox user={self.user!r}: that user cannot enter the folder of Unix sockets; be reached by TCP "
                "(--bind, --keys)"
            )
        self._identity()
        unreadable = [path for path in (os.__file__, __file__) if not self._reads(path)]
        if unreadable:
            raise InvalidArgumentError(
                f"sandbox user={self.user!r}: that user cannot read {unreadable[0]}, which runners import; install "
                "Python and penstock where all users can"
            )
        return f"runners run as {self.user!r}, who gets no shared memory: batches go through sockets, encrypted"

    def _identity(self) -> pwd.struct_passwd:
        try:
            return pwd.getpwnam(self.user)
        except KeyError:
            raise InvalidArgumentError(f"sandbox user={self.user!r} is no user of this host") from None

    def _reads(self, path: str) -> bool:
        pid = os.fork()
        if pid == 0:
            try:
                self._become()
                os._exit(0 if os.access(path, os.R_OK) else 1)
            finally:
                os._exit(1)
        return os.waitpid(pid, 0)[1] == 0

    def _become(self) -> None:
        whom = self._identity()
        os.initgroups(whom.pw_name, whom.pw_gid)
        os.setresgid(whom.pw_gid, whom.pw_gid, whom.pw_gid)
        os.setresuid(whom.pw_uid, whom.pw_uid, whom.pw_uid)
        os.environ["HOME"] = whom.pw_dir

    def enter(self) -> None:
        """Give up what is to be given up, for good. Before there are threads, and before a job's code is loaded."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.user:
            self._become()
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = MAX_PROCESSES if hard == resource.RLIM_INFINITY else min(MAX_PROCESSES, hard)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this kernel does not keep processes from new privileges")
