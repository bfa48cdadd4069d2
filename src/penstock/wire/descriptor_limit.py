"""How many connections a process may hold: libzmq accepts as many as there are descriptors, so there should be many.

libzmq has no bound on connections before the handshake. What bounds a stranger is how long a handshake may take, and
what each connection costs; what protects the process from running out is that the limit is as high as it is allowed to
be.
"""

from __future__ import annotations

import resource

ENOUGH = 65_536  # a process that closes all descriptors up to the limit one by one should not take seconds


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors as far as is allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft
