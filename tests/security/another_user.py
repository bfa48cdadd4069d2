"""What another user of this host does, in a process of his."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest

NOBODY = 65_534
_Found = TypeVar("_Found")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_another_user(act: Callable[[], _Found], user: int = NOBODY) -> _Found:
    """Return what a function returns that another user runs."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            found: object = act()
        except BaseException as error:
            traceback.print_exc()
            found = error
        with open(writing, "wb") as file:
            file.write(pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = pickle.loads(file.read())
    os.waitpid(pid, 0)
    if isinstance(found, BaseException):
        raise found
    return found  # type: ignore[return-value]
