"""Servers that speak S3, each in a process of its own.

    python s3_server.py moto FOLDER      moto, with the folder's files put into a bucket
    python s3_server.py files FOLDER     the folder itself: GET with ranges, HEAD and listing, by sendfile

prints its port. moto copies a whole object to answer for a part of it, so that a reader that asks for ranges, as
readers of a real store do, measures moto; hence the second.
"""

from __future__ import annotations

import os
import sys
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        url = urlsplit(self.path)
        bucket, _, key = url.path.lstrip("/").partition("/")
        path = self.folder / unquote(key)
        if bucket == BUCKET and not key:
            self.send_text(200, self.listing(parse_qs(url.query).get("prefix", [""])[0]))
        elif bucket != BUCKET or not path.is_file() or self.folder not in path.resolve().parents:
            self.send_text(404, "<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send_file(path, body=body)

    def send_file(self, path: Path, *, body: bool) -> None:
        size = path.stat().st_size
        start, stop = 0, size
        asked = self.headers.get("Range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else size - int(last)
            stop = min(size, int(last) + 1) if first and last else size
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size:032x}"')
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if body:
            self.wfile.flush()
            with path.open("rb") as file:
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    def listing(self, prefix: str) -> str:
        files = [path for path in sorted(self.folder.iterdir()) if path.name.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{escape(path.name)}</Key><Size>{path.stat().st_size}</Size>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(path.stat().st_mtime))}</LastModified>"
            f'<ETag>"{path.stat().st_size:032x}"</ETag><StorageClass>STANDARD</StorageClass></Contents>'
            for path in files
        )
        return (
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(files)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        )

    def send_text(self, status: int, text: str) -> None:
        content = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing: a line a request would be half of the work."""


def serve_files(folder: Path) -> None:
    Handler.folder = folder.resolve()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


def serve_moto(folder: Path) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="bench",
        aws_secret_access_key="bench",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), BUCKET, path.name)
    print(port, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    {"moto": serve_moto, "files": serve_files}[sys.argv[1]](Path(sys.argv[2]))
