"""Where a process listens, as somebody on the same host can find out."""

from __future__ import annotations

import psutil


def listening_addresses(pid: int) -> list[str]:
    """Return where a process listens: tcp://, and ipc:// for sockets with a name in a directory."""
    process = psutil.Process(pid)
    found = [
        f"tcp://127.0.0.1:{connection.laddr.port}"
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    found += [
        f"ipc://{connection.laddr}"
        for connection in process.net_connections(kind="unix")
        if isinstance(connection.laddr, str) and connection.laddr.startswith("/") and not connection.raddr
    ]
    return sorted(set(found))
