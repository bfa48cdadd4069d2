"""S3 over real HTTP: moto's server, and a proxy before it that adds latency, faults, and counts."""

from __future__ import annotations

import io
import os
import socket
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.waiting import wait_until

from penstock.core.errors import (
    FileChangedError,
    InvalidArgumentError,
    MissingExtraError,
    NoFilesError,
    StorageUnavailableError,
    TruncatedFileError,
)
from penstock.graph.readers import ReadFiles, ReadImages, ReadText, ReadWebdataset
from penstock.sources import object_store
from penstock.sources.base import SplitPosition
from penstock.sources.listing import list_files
from penstock.sources.object_store import s3_config
from penstock.sources.registry import open_source, source_digest
from penstock.sources.storage import AccessDeniedError, open_file, open_random

BIG = bytes(range(256)) * 40_000  # 10 MB: two blocks
KEYS = {
    "text/a.txt": b"a",
    "text/b.txt": b"bb",
    "text/c.md": b"ccc",
    "text/deep/d.txt": b"dddd",
    "text/.hidden": b"h",
    "text/": b"",
    "text/deep/": b"",
    "odd/what?.txt": b"1",
    "odd/x{a,b}.txt": b"22",
    "odd/sp ace#%20.txt": b"333",
    "img/cat/1.jpg": b"cat1",
    "img/dog/1.jpg": b"dog1",
    "img/dog/2.JPG": b"dog2",
    "big.bin": BIG,
    **{f"many/{i:04d}.txt": b"x" * i for i in range(80)},
    **{f"shards/s-{i:02d}.tar": b"" for i in range(12)},
}


def shard(number: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i in range(20):
            header = tarfile.TarInfo(f"{number:02d}-{i:02d}.bin")
            header.size = 5000 + i
            archive.addfile(header, io.BytesIO(bytes([number]) * header.size))
    return out.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
    )
    client.create_bucket(Bucket="data")
    for key, content in KEYS.items():
        body = shard(int(key[-6:-4])) if key.startswith("shards/") else content
        client.put_object(Bucket="data", Key=key, Body=body, ACL="public-read" if key == "big.bin" else "private")
    yield url
    moto.stop()


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


def options(url: str) -> dict[str, Any]:
    return {"key": "k", "secret": "s", "endpoint_url": url}


SILENCE = object()


class Proxy:
    """Passes TCP on to the server. A request is in flight from its first byte until the answer's first byte.

    `latency_s` delays every request; `gate` holds all of them; `faults` are taken one per request: the bytes to answer
    with instead of asking the server, the number of bytes of the answer after which the connection breaks, or SILENCE.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self.latency_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.faults: deque[bytes | int | object] = deque()
        self.requests: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._sockets.append(client)
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _count(self, change: int) -> None:
        with self._lock:
            self.in_flight += change
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server:
            self._sockets.append(server)
            try:
                while request := client.recv(1 << 16):
                    self.requests.append(request.partition(b"\r\n")[0].decode())
                    self._count(+1)
                    self.gate.wait(30)
                    time.sleep(self.latency_s)
                    fault = self.faults.popleft() if self.faults else None
                    if isinstance(fault, bytes):
                        self._count(-1)
                        client.sendall(fault)
                        continue
                    if fault is SILENCE:
                        self._count(-1)
                        continue
                    server.sendall(request)
                    if not self._pass_on(server, client, fault if isinstance(fault, int) else None):
                        return
            except OSError:
                return  # one side is gone

    def _pass_on(self, server: socket.socket, client: socket.socket, fault: int | None) -> bool:
        """Pass one answer on: its head, then as many bytes as it says."""
        answer = server.recv(1 << 16)
        self._count(-1)
        while answer and b"\r\n\r\n" not in answer:
            answer += server.recv(1 << 16)
        head, _, body = answer.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        is_head = self.requests[-1].startswith("HEAD") and b"206" not in head.split(b"\r\n")[0]
        left = 0 if is_head or not lengths else int(lengths[0]) - len(body)
        if fault is not None:
            client.sendall(answer[:fault])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
            return False
        client.sendall(answer)
        while left > 0 and (part := server.recv(1 << 20)):
            client.sendall(part)
            left -= len(part)
        return b"connection: close" not in head.lower()

    def close(self) -> None:
        self.gate.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed already
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.close()


LISTINGS = [
    ("text", ["a.txt", "b.txt", "c.md", "deep/d.txt"]),
    ("text/", ["a.txt", "b.txt", "c.md", "deep/d.txt"]),
    ("text/*.txt", ["a.txt", "b.txt"]),
    ("text/*", ["a.txt", "b.txt", "c.md"]),
    ("text/**/*.txt", ["a.txt", "b.txt", "deep/d.txt"]),
    ("t*/deep/*", ["text/deep/d.txt"]),
    ("text/{a,b}.txt", ["a.txt", "b.txt"]),
    ("odd/what?.txt", ["what?.txt"]),
    ("odd/x{a,b}.txt", ["x{a,b}.txt"]),
    ("odd/sp ace#%20.txt", ["sp ace#%20.txt"]),
    ("many/{0003..0079}.txt", [f"{i:04d}.txt" for i in range(3, 80)]),
    ("many/00[01]?.txt", [f"{i:04d}.txt" for i in range(20)]),
]


@pytest.mark.parametrize(("pattern", "expected"), LISTINGS)
def test_patterns_stand_for_the_same_keys_as_for_local_files(server: str, pattern: str, expected: list[str]) -> None:
    files = list_files([f"s3://data/{pattern}"], options(server))
    assert [file.relative for file in files] == expected
    for file in files:
        assert file.size == len(KEYS[file.path.removeprefix("s3://data/")])
        assert len(file.etag) == 32


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("s3://data/none.txt", "s3://data/none.txt: no such file or folder"),
        ("s3://data/many/{0000..0090}.txt", "many/0080.txt: no such file or folder"),
        ("s3://data/text/*.tar", "searched the folder s3://data/text, which has 4 files and 1 folders"),
        ("s3://nowhere/*.tar", "s3://nowhere.*: no such bucket"),
    ],
)
def test_what_is_missing_is_named(server: str, path: str, told: str) -> None:
    with pytest.raises(NoFilesError, match=told):
        list_files([path], options(server))


def test_many_named_files_cost_a_listing_and_not_a_request_each(proxy: Proxy) -> None:
    list_files(["s3://data/many/{0000..0079}.txt"], options(proxy.url))
    assert len(proxy.requests) <= 3


@pytest.mark.parametrize(
    "style",
    [
        lambda url: {"key": "k", "secret": "s", "token": "t", "endpoint_url": url},
        lambda url: {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"}},
        lambda url: {"anon": True, "endpoint_url": url},
        lambda url: {"access_key_id": "k", "secret_access_key": "s", "endpoint": url, "region": "us-east-1"},
        lambda url: {"config": {"skip_signature": True, "endpoint": url}, "client_options": {"timeout": "20s"}},
    ],
)
def test_options_of_s3fs_and_of_obstore_are_understood(server: str, style: Callable[[str], dict[str, Any]]) -> None:
    assert [file.size for file in list_files(["s3://data/big.bin"], style(server))] == [len(BIG)]
    assert [file.size for file in list_files(["s3://data/big.bin"], tuple(style(server).items()))] == [len(BIG)]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_is_enough(server: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert [file.relative for file in list_files(["s3://data/big.bin"])] == ["big.bin"]


def test_options_win_over_the_environment() -> None:
    _, settings = s3_config({"endpoint_url": "https://host"}, {"AWS_ENDPOINT_URL": "http://other"})
    assert "allow_http" not in settings["client_options"]
    _, settings = s3_config({}, {"AWS_ENDPOINT_URL": "http://other"})
    assert settings["client_options"]["allow_http"] is True


def test_an_option_nobody_knows_is_refused_without_its_value(server: str) -> None:
    with pytest.raises(InvalidArgumentError, match="endpont") as caught:
        list_files(["s3://data/x"], {**options(server), "endpont": "hidden-value"})
    assert "hidden-value" not in str(caught.value)


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[s3\]"):
        list_files(["s3://data/x"])


def test_a_file_is_read_in_blocks_and_from_any_byte(server: str) -> None:
    with open_file("s3://data/big.bin", len(BIG), options(server)) as file:
        assert file.read() == BIG
    with open_file("s3://data/big.bin", len(BIG), options(server), start=5_000_001) as file:
        assert file.read(1000) == BIG[5_000_001:5_001_001]
    with open_random("s3://data/big.bin", len(BIG), options(server)) as file:
        file.seek(-10, io.SEEK_END)
        assert file.read() == BIG[-10:]


def test_opening_starts_the_requests_and_waits_for_nothing(proxy: Proxy) -> None:
    proxy.gate.clear()
    with ExitStack() as stack:
        paths = [f"s3://data/shards/s-{i:02d}.tar" for i in range(6)]
        files = [stack.enter_context(open_file(path, len(shard(0)), options(proxy.url))) for path in paths]
        big = stack.enter_context(open_file("s3://data/big.bin", len(BIG), options(proxy.url)))
        wait_until(lambda: proxy.in_flight == 8, "six small files and two blocks of a big one in flight")
        proxy.gate.set()
        assert [file.read() for file in files] == [shard(i) for i in range(6)]
        assert big.read() == BIG
    assert all("HEAD" not in request for request in proxy.requests), "the listing has the sizes"


def test_shards_opened_ahead_overlap_under_latency(proxy: Proxy) -> None:
    proxy.latency_s = 0.05
    source = open_source(
        ReadWebdataset(paths=("s3://data/shards/s-{00..11}.tar",), storage_options=tuple(options(proxy.url).items()))
    )
    assert source.remote
    splits = deque(source.splits())
    proxy.most_in_flight = 0
    keys: list[str] = []
    opened: deque[Any] = deque()
    while splits or opened:
        while splits and len(opened) < 6:
            opened.append(source.open(splits.popleft(), SplitPosition()))
        reader = opened.popleft()
        while elements := reader.read(8).elements:
            keys.extend(element["__key__"] for element in elements)
        reader.close()
    assert keys == [f"{shard:02d}-{i:02d}" for shard in range(12) for i in range(20)]
    assert proxy.most_in_flight >= 4


def test_many_small_objects_are_fetched_side_by_side(proxy: Proxy) -> None:
    proxy.latency_s = 0.05
    source: Any = open_source(ReadFiles(paths=("s3://data/many",), storage_options=tuple(options(proxy.url).items())))
    assert len(source) == 80
    proxy.most_in_flight = 0
    elements = source.fetch(range(79, -1, -1))
    assert [len(element["data"]) for element in elements] == list(range(79, -1, -1))
    assert proxy.most_in_flight >= 8


def test_image_folders_live_in_buckets_too(server: str) -> None:
    node = ReadImages(paths=("s3://data/img",), storage_options=tuple(options(server).items()))
    source: Any = open_source(node)
    assert source.fetch([2, 0]) == [
        {"image": b"dog2", "label": 1, "path": "dog/2.JPG"},
        {"image": b"cat1", "label": 0, "path": "cat/1.jpg"},
    ]
    assert source_digest(source) == source_digest(open_source(node))


UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "faults",
    [[UNAVAILABLE] * 3, [0], [100], [100_000, 50_000]],
    ids=["503 three times", "reset before the answer", "reset in the head", "reset in the body, twice"],
)
def test_passing_faults_are_retried(proxy: Proxy, faults: list[bytes | int]) -> None:
    proxy.faults.extend(faults)
    with open_file("s3://data/big.bin", len(BIG), options(proxy.url)) as file:
        assert file.read() == BIG
    assert not proxy.faults


def test_a_connection_that_falls_silent_is_given_up(proxy: Proxy) -> None:
    proxy.faults.append(SILENCE)
    patience = {"client_options": {"read_timeout": "1s"}}
    with open_file("s3://data/big.bin", len(BIG), {**options(proxy.url), **patience}) as file:
        assert file.read() == BIG
    assert not proxy.faults


@contextmanager
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_store, "RETRIES", 1)
    object_store._connect.cache_clear()
    yield
    object_store._connect.cache_clear()


def test_retries_end_and_name_url_and_range(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.faults.extend([UNAVAILABLE] * 1000)
    told = r"s3://data/big\.bin: bytes 0 to 10 could not be read in 3 tries"
    with impatient(monkeypatch), pytest.raises(StorageUnavailableError, match=told):
        open_random("s3://data/big.bin", len(BIG), options(proxy.url)).read(10)
    assert len(proxy.requests) == 6


def test_missing_credentials_are_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    nobody = {"metadata_endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
    with pytest.raises(AccessDeniedError) as caught:
        list_files(["s3://data/text/a.txt"], tuple(nobody.items()))
    said = str(caught.value)
    assert said.startswith("s3://data/text/a.txt: there are no credentials for S3: "), said
    assert "'anon': True" in said and "AWS_ACCESS_KEY_ID" in said
    assert "/latest/" not in said and "127.0.0.1" not in said


def test_denied_access_is_not_retried_and_says_what_to_do(proxy: Proxy) -> None:
    proxy.faults.extend([FORBIDDEN] * 100)
    with pytest.raises(AccessDeniedError, match=r"access denied.*storage_options"):
        open_random("s3://data/big.bin", len(BIG), options(proxy.url)).read(10)
    assert len(proxy.requests) == 1


def test_a_bucket_that_may_be_read_and_not_listed_takes_braces(proxy: Proxy) -> None:
    proxy.faults.append(FORBIDDEN)  # the answer to a look for an object named with braces
    assert len(list_files(["s3://data/text/{a,b}.txt"], options(proxy.url))) == 2
    proxy.faults.extend([FORBIDDEN] * 2)  # and to listing a folder
    assert len(list_files(["s3://data/many/{0000..0079}.txt"], options(proxy.url))) == 80
    proxy.faults.extend([FORBIDDEN] * 9)
    with pytest.raises(AccessDeniedError):
        list_files(["s3://data/text/*.txt"], options(proxy.url))


def test_an_object_that_is_gone_is_named(server: str) -> None:
    with pytest.raises(NoFilesError, match=r"s3://data/gone\.bin"):
        open_file("s3://data/gone.bin", 10, options(server)).read()


def test_an_object_shorter_than_listed_is_named(server: str) -> None:
    for start in (0, 100):
        with pytest.raises(TruncatedFileError, match=r"s3://data/text/a\.txt"):
            open_file("s3://data/text/a.txt", 200, options(server), start=start).read()


@pytest.mark.parametrize("content", [b"b" * 1000, b"a" * 900, b"a" * 1100], ids=["rewritten", "shorter", "longer"])
@pytest.mark.parametrize("reader", [ReadText, ReadFiles])
def test_an_object_written_anew_since_it_was_listed_is_told(server: str, reader: type[Any], content: bytes) -> None:
    client = boto3.client(
        "s3", endpoint_url=server, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
    )
    client.put_object(Bucket="data", Key="changing/x.txt", Body=b"a" * 1000)
    source = open_source(reader(paths=("s3://data/changing/x.txt",), storage_options=tuple(options(server).items())))
    (split,) = source.splits()
    assert source.open(split, SplitPosition()).read(1).elements
    client.put_object(Bucket="data", Key="changing/x.txt", Body=content)
    with pytest.raises(FileChangedError, match=r"s3://data/changing/x\.txt.*1,000 bytes when it was listed"):
        source.open(split, SplitPosition()).read(1)
