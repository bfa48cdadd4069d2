"""Pipelines under an id: one program registers, others read without the code.

What is registered is what workers need: the graph with its functions, and the list of splits. A reader fetches both,
and decodes them without loading a function; what the functions are is the workers' affair alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal, NoReturn, TypeAlias

import msgspec

from penstock.api.dataset import Dataset
from penstock.api.iteration import Plan
from penstock.api.loader import FromService, Loader
from penstock.api.services import OwnedService
from penstock.api.states import PipelineSignature, signature_of
from penstock.client.backend import ServiceBackend
from penstock.client.link import Patience, ServiceLink, find_when_there
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError, ProtocolError, choice
from penstock.core.ids import BlobHash
from penstock.graph.codec import decode_graph
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.parameters import short_label
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.runtime.distributable import for_workers
from penstock.sources.base import Source
from penstock.sources.listing_codec import Listing, decode_listings, open_source
from penstock.submission.feeds import NamedSplits
from penstock.submission.jobs import Prepared, prepare, submission
from penstock.submission.options import JobOptions, Limits, check_options
from penstock.wire.blobs import blob_hash, fetch_blob, put_blob_pieces
from penstock.wire.credentials import ServiceFile, find_service
from penstock.wire.jobs import JobSpec
from penstock.wire.messages import Done, GetPipeline, NotYet, PutPipeline, Spec
from penstock.wire.modes import Access

AnyService: TypeAlias = str | os.PathLike[str] | OwnedService
"""An address, a service file, or a service of this process's own."""

REGISTERED_SHARDINGS = ("dynamic", "off")


def register(
    service: AnyService,
    dataset: Dataset,
    *,
    id: str,
    sharding: Literal["dynamic", "off"] = "dynamic",
    timeout_s: float | None = None,
    access: Access | None = None,
) -> None:
    """Put a pipeline into a service, to be read by `read_registered(service, id)` without its code.

    It is yours, as your key says: others read it if `access` shares it with them and they trust you.

    The same pipeline may be registered again; another one under the same id is refused. Its files are listed now, and
    that list is what readers get. With `sharding="off"` it may have operators that count, and each worker runs all.
    """
    _check_id(id)
    if sharding not in REGISTERED_SHARDINGS:
        raise choice("sharding", sharding, REGISTERED_SHARDINGS)
    if isinstance(dataset, Loader):
        raise InvalidPipelineError("this is a loader already: register the dataset it was made from")
    options = check_options(sharding=sharding, limits=Limits(timeout_s=timeout_s), access=access)
    made = submission(prepare(dataset._plan, options), options, seed=dataset._plan.seed, workers=lambda: 1)
    patience = Patience(timeout_s, f"registering pipeline {id!r}")
    link = _connect(service, patience)
    try:
        while not isinstance(answer := link.ask(PutPipeline(id=id, spec=made.spec), patience, "registering"), Done):
            if not isinstance(answer, NotYet):
                raise TypeError(f"PutPipeline was answered with {type(answer).__name__}")
            for missing in answer.missing_blobs:
                for piece in put_blob_pieces(made.blobs[missing]):
                    link.ask(piece, patience, "storing the pipeline")
            if not answer.missing_blobs:
                patience.wait(0.1, answer.waiting_for)
    finally:
        link.close()


def read_registered(service: AnyService, id: str, **options: Any) -> Loader:
    """Read the pipeline registered under `id`; `options` are those of `Dataset.distribute`.

    Each call without `job=` is a job of its own; processes that give the same name share its data. How files are cut
    into splits was settled when it was registered, so that sharding by file is not to be had here.
    """
    _check_id(id)
    checked = check_options(**options)
    patience = Patience(checked.limits.timeout_s, f"pipeline {id!r}")
    link = _connect(service, patience)
    try:
        answer = link.ask(GetPipeline(id=id, trust=checked.access.trust), patience, "the registered pipeline")
        if not isinstance(answer, Spec):
            raise InvalidArgumentError(
                f"no pipeline {id!r} is registered at {link.address}; register it with register(service, dataset, id=)"
            )
        graph, listings = (_fetch(link, name, patience) for name in (answer.spec.graph, answer.spec.splits))
    finally:
        link.close()
    if "sharding" not in options and answer.spec.sharding.off:
        checked = check_options(**{**options, "sharding": "off"})
    dataset = _Registered(id, answer.spec, graph, listings)
    dataset.check(checked)
    backend = _RegisteredBackend(dataset, checked, _finder(service))
    return Loader(
        FromService(backend=backend, dataset=dataset), memory_bytes=checked.limits.memory_bytes, seed=checked.seed
    )


class _Registered(Dataset):
    """A pipeline as the service has it. Its functions are never loaded here."""

    def __init__(self, id: str, spec: JobSpec, graph: bytes, listings: bytes) -> None:
        super().__init__(decode_graph(graph))
        self.id, self.spec = id, spec
        self._graph, self._listings = graph, listings
        self._plan: _RegisteredPlan = _RegisteredPlan(self, decode_listings(listings))

    def check(self, options: JobOptions) -> None:
        """Refuse what a pipeline that was cut and checked elsewhere cannot be read with."""
        if options.sharding.policy in ("file", "file_or_data", "custom"):
            raise InvalidArgumentError(
                f"sharding={options.sharding.policy!r}: pipeline {self.id!r} was cut into splits when it was "
                "registered; use 'dynamic', 'data', 'hint' or 'off', or distribute() the dataset itself"
            )
        if options.feed is not None:
            raise InvalidArgumentError(
                f"feed= with pipeline {self.id!r}: it was cut into splits when it was registered; distribute() the "
                "dataset itself"
            )
        if self.spec.sharding.off and not options.sharding.off:
            for_workers(self.node, options.sharding.policy)
            raise InvalidArgumentError(
                f"sharding={options.sharding.policy!r}: pipeline {self.id!r} was registered with sharding='off'; read "
                "it so"
            )

    def prepared(self) -> Prepared:
        counts = self.spec.split_counts
        sources = [node for node in walk(self.node) if isinstance(node, SourceNode)]
        return Prepared(
            root=self.node,
            graph=self._graph,
            sources=tuple(NamedSplits(short_label(node), ()) for node in sources),
            listings=self._listings,
            counts=counts,
            fingerprint=self.spec.fingerprint,
            versions=self.spec.versions,
            splits_digest=self.spec.splits,
        )


class _RegisteredPlan(Plan):
    def __init__(self, registered: _Registered, listings: list[Listing]) -> None:
        super().__init__(registered.node)
        self._spec = registered.spec
        sources = [node for node in walk(registered.node) if isinstance(node, SourceNode)]
        self._listings = dict(zip(sources, listings))

    @property
    def seed(self) -> int:
        return self._spec.seed

    def fingerprint(self) -> str:
        return self._spec.fingerprint

    @cached_property
    def signature(self) -> PipelineSignature:
        return signature_of(self.written, self._digest)

    def _digest(self, node: SourceNode) -> str:
        content = msgspec.msgpack.encode(self._listings[node])
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def source_of(self, node: SourceNode) -> Source:
        if _has_code(node):
            raise InvalidArgumentError(f"{short_label(node)} is registered code, which is not loaded here")
        return open_source(node, self._listings[node])

    def source_length(self, node: SourceNode) -> int | None:
        return None if _has_code(node) else super().source_length(node)

    def explain(self, *, analyze: bool, mermaid: bool, duration_s: float) -> str:
        if analyze:
            raise InvalidArgumentError("a registered pipeline runs on workers only; explain it without analyze=True")
        return super().explain(analyze=False, mermaid=mermaid, duration_s=duration_s)


class _RegisteredBackend(ServiceBackend):
    def __init__(self, dataset: _Registered, options: JobOptions, find: Callable[[], ServiceFile]) -> None:
        super().__init__(dataset._plan, options, find)
        self._prepared = dataset.prepared()


def _has_code(node: SourceNode) -> bool:
    return any(isinstance(value, (Payload, UserFunction)) for _, value in node.parameters())


def _check_id(id: object) -> None:
    if not isinstance(id, str) or not id.strip():
        raise InvalidArgumentError(f"id={id!r} must be a name")


def _finder(service: AnyService) -> Callable[[], ServiceFile]:
    if isinstance(service, OwnedService):
        own = service._for_clients()
        return lambda: own
    if not isinstance(service, (str, os.PathLike)):
        raise InvalidArgumentError(f"service={service!r} must be an address, a service file or a OwnedService")
    text = os.fspath(service)
    return lambda: find_service(text)


def _connect(service: AnyService, patience: Patience) -> ServiceLink:
    return ServiceLink(find_when_there(_finder(service), patience), name="registered")


def _fetch(link: ServiceLink, name: BlobHash, patience: Patience) -> bytes:
    try:
        content = fetch_blob(name, partial(link.ask, patience=patience, what="the registered pipeline"))
    except ProtocolError:
        return _damaged(link, name)
    return content if blob_hash(content) == name else _damaged(link, name)


def _damaged(link: ServiceLink, name: BlobHash) -> NoReturn:
    raise InvalidPipelineError(f"{link.address} has not the content {name} of the pipeline; register it again")
