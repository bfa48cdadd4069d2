"""Asking a dispatcher's HTTP side."""

from __future__ import annotations

import http.client


def get(port: int, path: str, *, token: str | None = None, host: str | None = None) -> tuple[int, str]:
    """Return the status and the text; `host` stands in the Host header."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.putrequest("GET", path, skip_host=host is not None)
        for name, value in (headers | ({} if host is None else {"Host": host})).items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
