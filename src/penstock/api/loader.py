"""`Loader`: what `distribute` returns. It is read like the dataset, epoch after epoch, wherever the work runs.

It has the operators of a dataset: what stands after `distribute` runs in this process, over what the service delivers.
Where that is, threads here, processes of the loader's own, or a service, `make_loader` says.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import indent
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from penstock.api.dataset import Dataset
from penstock.api.epochs import (
    Direct,
    Epoch,
    FromService,
    Here,
    Loaded,
    LoadedState,
    WayOfReading,
    load,
    save,
    walk_through,
)
from penstock.api.fed import FedHere
from penstock.api.operators import Operators
from penstock.api.piped import Piped
from penstock.api.services import LocalService, OwnedService
from penstock.api.states import parts_in, with_parts
from penstock.api.statistics import LoaderStatistics
from penstock.client.backend import ServiceBackend
from penstock.core.checks import check_whole
from penstock.core.element import Element
from penstock.core.errors import (
    InvalidArgumentError,
    InvalidPipelineError,
    ServiceFileMissingError,
    StateMismatchError,
    SupersededError,
)
from penstock.core.host_memory import HostMemory
from penstock.graph import ops
from penstock.graph.length import known_length
from penstock.graph.node import Node
from penstock.graph.readers import ColumnarSource, SourceNode
from penstock.graph.traverse import walk
from penstock.processes.service_processes import ServiceProcesses
from penstock.stream.checkpoint import ConsumerState, Weights
from penstock.submission.options import JobOptions
from penstock.wire.credentials import SERVICE_VARIABLE, ServiceFile, find_service
from penstock.wire.figures import JobFigures

__all__ = ["NEWER_ITERATOR", "FromService", "Loader", "make_loader"]

NEWER_ITERATOR = (
    "a newer iterator of this loader was made, and a loader has one at a time. Make a loader for each of those that "
    "are to be read side by side"
)


class Loader(Operators):
    """Reads a dataset through a service, or here: each iteration is the next epoch. A context manager.

    It has one iterator at a time: whoever reads on with an older one that had not ended gets a `SupersededError`.
    `state_dict()` says what this process has received; `load_state_dict()` decides where the next iteration begins.
    """

    LEADS = True

    def __init__(
        self,
        node: Node,
        *,
        threads: int | None = None,
        memory_bytes: int | None = None,
        seed: int | None = None,
        drawn: int | None = None,
        fed: JobOptions | None = None,
    ) -> None:
        """`drawn` is the seed of what is read here, where neither `seed` nor an operator says one. `fed`: a sampler
        says the order of what is read here.
        """
        super().__init__(node)
        self._threads, self._memory_bytes, self._drawn, self._fed = threads, memory_bytes, drawn, fed
        self._sources = [each for each in walk(node) if isinstance(each, FromService)]
        self._kind = self._choose_kind()
        self._next_epoch = 0
        self._seed = self._given_seed = seed
        self._weights: Weights | None = None
        """What a mix goes by in epochs that begin; None: the pipeline's own."""
        self._loaded: Loaded | None = None
        self._epoch: Epoch | None = None

    def _choose_kind(self) -> WayOfReading:
        node, threads, memory_bytes = self._node, self._threads, self._memory_bytes
        if self._fed is not None:
            return FedHere(self._plan, self._fed, threads=threads, memory_bytes=memory_bytes, drawn=self._drawn)
        if not self._sources:
            return Here(self._plan, threads=threads, memory_bytes=memory_bytes, drawn=self._drawn)
        if node is self._sources[0]:
            return Direct(self._sources[0])
        return Piped(node, self._sources, threads=threads, memory_bytes=memory_bytes)

    # Reading

    def __iter__(self) -> Iterator[Element]:
        loaded, self._loaded = self._loaded, None
        if self._epoch is not None:
            self._epoch.close(SupersededError(NEWER_ITERATOR))
            self._epoch = None
        epoch = self._next_epoch
        if loaded is not None:
            epoch, self._seed = loaded.epoch, loaded.seed
        try:
            self._epoch = self._kind.open(epoch, self._seed, loaded, self._weights)
        except BaseException:
            self._loaded = loaded  # so that trying again begins where it was to begin
            raise
        self._next_epoch = epoch + 1
        return iter(self._epoch.elements)

    def __len__(self) -> int:
        kind = self._kind
        count = kind.length() if isinstance(kind, FedHere) else known_length(self._node, self._source_length)
        if count is None:
            raise TypeError("the length of this loader is not known before it is read; declare it with with_length()")
        return count

    def _source_length(self, node: SourceNode) -> int | None:
        if not isinstance(node, FromService):
            return self._plan.source_length(node)
        options = node.backend.options
        if options.feed is not None:
            return node.backend.fed_length()
        if options.sharding.off or options.ranks.uneven == "allow":
            return None
        if options.sharding.static and any(
            isinstance(each, ColumnarSource) and each.batch for each in walk(node.dataset.node)
        ):
            return None  # batches end with splits, which are cut otherwise
        try:
            total = len(node.dataset)
        except TypeError:
            return None
        count, uneven = options.ranks.count, options.ranks.uneven
        return total // count if uneven == "drop" else -(-total // count)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch."""
        check_whole("epoch", epoch, 0)
        self._next_epoch, self._loaded = epoch, None

    def set_weights(self, weights: Sequence[float]) -> None:
        """Let the pipeline's `mix` go by other weights: from the next element on, and in the epochs to come.

        What was received ahead is given up, and streams are opened anew where this process stands. With several
        consumers all of them call it at the same step, in deterministic order or with coordinated reads; between
        epochs in any order. A state has the weights in it. They are shares of what follows: nothing is caught up with.
        """
        if len(self._sources) != 1:
            raise InvalidArgumentError(
                "set_weights() is for a loader over one service; read through one with distribute(to=...)"
            )
        backend = self._sources[0].backend
        checked = backend.check_weights(weights)
        if self._loaded is not None and self._loaded.place is not None:
            raise InvalidArgumentError(
                "set_weights() between load_state_dict() and the first element: begin to iterate, then set them"
            )
        if self._epoch is not None:
            self._epoch.set_weights(checked)
        self._weights = checked

    # State

    def state_dict(self, all: bool = False) -> dict[str, Any]:
        """Return where this process stands: small, JSON-able, self-contained.

        With `all` it stands for every consumer and is the same on every rank, so that one rank may save it for all.
        """
        state = self.note_state()()
        return self._for_all(state) if all else state

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Note down where this process stands, for less than a state costs; the function returned makes the state.

        For who reads ahead of the training: note the place of each batch, and make the state of the one trained last.
        """
        if self._loaded is not None:
            return partial(copy.deepcopy, self._loaded.state)
        if self._epoch is not None:
            return self._epoch.note_state()
        return partial(save, self._kind, epoch=self._next_epoch, seed=self._seed, phase="start", weights=self._weights)

    def _for_all(self, state: dict[str, Any]) -> dict[str, Any]:
        if "states" in state or state.get("consumer", 0) is None or state.get("consumers", 1) == 1:
            return state
        apart = self._kind.leaving_apart() if isinstance(self._kind, Piped) and state["phase"] == "reading" else None
        if apart is not None:
            raise InvalidArgumentError(
                f"state_dict(all=True) with {apart.name}() after distribute(): how much of what a rank received makes "
                "an output follows from the data, so that ranks stand at different places after as many steps. Save "
                "each rank's state_dict()"
            )
        parts = [ConsumerState.read(part) for part in parts_in(state["place"])]
        if not all(part.alike for part in parts):
            raise InvalidArgumentError(
                "state_dict(all=True) with order='relaxed': the ranks stand at different places. Save each rank's "
                "state_dict() and load the list of them, or use order='deterministic' or coordinated=True"
            )
        if any(
            part.sampler is not None and ("sampler" in part.sampler or "iterator" in part.sampler) for part in parts
        ):
            raise InvalidArgumentError(
                "state_dict(all=True) with a sampler that has a state of its own: each rank's is another. Save each "
                "rank's state_dict()"
            )
        return {**state, "consumer": None, "place": with_parts(state["place"], {"consumer": None})}

    def load_state_dict(self, state: LoadedState | Sequence[LoadedState]) -> None:
        """Begin the next iteration where `state` was taken; taken after the loop had ended, at the next epoch.

        It is this rank's own state, one made with `state_dict(all=True)`, or the list of the states of all ranks,
        which is what another number of ranks needs.
        """
        given: list[LoadedState] = [state] if isinstance(state, Mapping) else list(state)
        if len(given) == 1 and "states" in given[0]:
            given = list(given[0]["states"])
        if not given:
            raise StateMismatchError("an empty list of states: give the state_dict() of every rank")
        self._loaded = load(self._kind, given)
        self._next_epoch, self._weights = self._loaded.epoch, self._loaded.weights

    # The rest

    def statistics(self) -> LoaderStatistics:
        """Return figures of the present epoch, or of the last one."""
        return LoaderStatistics() if self._epoch is None else self._epoch.statistics()

    def job_figures(self, *, timeout_s: float = 10.0) -> JobFigures:
        """Ask the service for what it knows of the job in numbers: its stages on workers, its workers, its trainers.

        Sums are over all epochs, and over processes that are gone. They are one or two seconds old.
        """
        if len(self._sources) != 1:
            raise InvalidArgumentError(
                "job_figures() is for a loader over one service; statistics() has what runs in this process"
            )
        return self._sources[0].backend.figures(timeout_s)

    def close(self) -> None:
        """Let go of everything at once; what is on its way is dropped."""
        if self._epoch is not None:
            self._epoch.close()
        for source in self._sources:
            source.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def fingerprint(self) -> str:
        return self._sources[0].dataset.fingerprint() if self._sources else super().fingerprint()

    def explain(
        self, *, analyze: bool = False, format: Literal["text", "mermaid"] = "text", duration_s: float = 2.0
    ) -> str:
        """Return the whole plan: what runs on workers, and what runs here.

        With `analyze`, what stands before `distribute` is run here for `duration_s`, and what stands after it is not;
        `job_figures()` has what workers measure.
        """
        parts = [
            source.dataset.explain(analyze=analyze, format=format, duration_s=duration_s) for source in self._sources
        ]
        if not isinstance(self._kind, Direct):
            parts.append(super().explain(analyze=analyze and not parts, format=format, duration_s=duration_s))
        if format == "mermaid" or not self._sources:
            return "\n\n".join(parts)
        jobs = [source.backend.options.job for source in self._sources]
        titles = [*("on workers" if job is None else f"on workers, job {job!r}" for job in jobs), "in this process"]
        return "\n\n".join(f"{title}\n{indent(part, '  ')}" for title, part in zip(titles, parts))

    def _operators(self) -> Iterator[Node]:
        return walk_through(self._node)

    def _over(self, node: Node) -> Self:
        made = type(self)(
            node,
            threads=self._threads,
            memory_bytes=self._memory_bytes,
            seed=self._given_seed,
            drawn=self._drawn,
            fed=self._fed,
        )
        for source in made._sources:
            _check_cache(node, source.backend.options)
            _check_take(node, source.backend.options)
            _check_leaving(node, source.backend.options)
            if source.backend.options.order == "relaxed":
                _check_order(node)
            _check_shuffle(node)
        return made


def _check_order(node: Node) -> None:
    if node.traits.order_bound:
        what = "map(batch_size=...)" if isinstance(node, ops.Map) else f"{node.name}()"
        raise InvalidPipelineError(
            f"{what} after distribute(): what it holds depends on which stream came first, so its state could not be "
            "restored. Put it before distribute(), or use order='deterministic'"
        )


def _check_cache(node: Node, options: JobOptions) -> None:
    if not isinstance(node, ops.Cache):
        return
    if options.ranks.count > 1 and options.feed is None:
        raise InvalidPipelineError(
            f"cache() after distribute() with {options.ranks.count} consumers: one that has not cached the whole first "
            "epoch, because it was restarted or max_bytes was too small, would wait for the others in every epoch, and "
            "they read their caches. save() what is the same in every epoch and read that, or leave cache() out"
        )
    if node.path is not None:
        raise InvalidPipelineError(
            "cache(path) after distribute(): files would be found again by what stands here, not by what the service "
            "reads. Use cache() without a path, in memory"
        )


def _check_take(node: Node, options: JobOptions) -> None:
    if isinstance(node, ops.Take) and node.count != ops.NEVER_ENDS and options.sharing is not None:
        raise InvalidPipelineError(
            f"take({node.count}) after distribute(): trainers that share a job read one epoch of it at a time, which "
            "goes on for the others, so that the next iteration would begin in its middle. Leave the loop after so "
            "many elements instead; the next one goes on from there"
        )


def _check_leaving(node: Node, options: JobOptions) -> None:
    """Refuse what ends before its input where ranks are given unequal numbers: a rank that leaves is waited for."""
    ends_early = isinstance(node, ops.Zip) or (isinstance(node, ops.Take) and node.count != ops.NEVER_ENDS)
    if ends_early and options.ranks.count > 1 and options.ranks.uneven == "allow":
        raise InvalidPipelineError(
            f"{node.name}() after distribute() with uneven='allow': ranks have unequal numbers of elements, so that "
            "one leaves the epoch that another reads to its end, which then waits for the one that left. Use "
            "uneven='drop' or 'pad', with which they take equal steps"
        )


def _check_shuffle(node: Node) -> None:
    if isinstance(node, ops.Shuffle) and node.size is None:
        raise InvalidPipelineError(
            "shuffle() without a size after distribute(): it permutes what is read by index, and what comes from "
            "workers is not. Put it before distribute(), or give it a size: shuffle(10_000)"
        )


Destination: TypeAlias = int | str | os.PathLike[str] | OwnedService | None


def make_loader(
    dataset: Dataset, to: Destination, options: JobOptions, processes: ServiceProcesses | None = None
) -> Loader:
    """Return the loader. `processes` are its own, where it has some; nothing is sent before it is read."""
    if isinstance(to, bool) or not isinstance(to, (int, str, os.PathLike, OwnedService, type(None))):
        raise InvalidArgumentError(
            f"to={to!r} must be an address or a service file, a number of worker processes, a LocalService, or None"
        )
    if reads_here(to):
        return _here(dataset, options)
    if isinstance(to, int):
        assert processes is not None
        return _over_own(dataset, options, processes)
    if isinstance(to, OwnedService):
        find = partial(_described, to._for_clients(), to)
        memory = to._host_memory if isinstance(to, LocalService) else None
        return _over_service(
            dataset, options, find, workers=lambda: to._processes.expected_workers, service=to, memory=memory
        )
    text = None if to is None else os.fspath(to)
    try:
        found = find_service(text)
    except ServiceFileMissingError:
        return _over_service(dataset, options, lambda: find_service(text))  # it may be written later
    return _over_service(dataset, options, lambda: found)


def reads_here(to: Destination) -> bool:
    """Say whether this process does the work itself."""
    return to is None and not os.environ.get(SERVICE_VARIABLE)


def _here(dataset: Dataset, options: JobOptions) -> Loader:
    if options.sharing is not None:
        raise InvalidArgumentError(
            f"sharing={options.sharing.kind!r} needs a service that other trainers read too: give to= its address, or "
            f"set ${SERVICE_VARIABLE}"
        )
    if options.ranks.count > 1 and options.feed is None:
        raise InvalidArgumentError(
            f"{options.ranks.count} ranks need a service to deal to them: give to= its address, or set "
            f"${SERVICE_VARIABLE}"
        )
    if options.placement.cache is not None:
        raise InvalidArgumentError(
            f"cache={options.placement.cache!r} says what workers keep, and there are none here: give to= a number of "
            "them, or put autocache() into the pipeline"
        )
    limits = options.limits
    return Loader(
        dataset.node,
        memory_bytes=limits.memory_bytes,
        seed=options.seed,
        drawn=dataset._plan.seed,
        fed=None if options.feed is None else options,
    )


def _over_service(
    dataset: Dataset,
    options: JobOptions,
    find: Callable[[], ServiceFile],
    on_close: Callable[[], None] | None = None,
    workers: Callable[[], int] = lambda: 1,
    service: OwnedService | None = None,
    memory: HostMemory | None = None,
) -> Loader:
    backend = ServiceBackend(dataset._plan, options, find, on_close, workers, memory)
    if service is not None:
        service._tell_when_closed(backend)
    source = FromService(backend=backend, dataset=dataset)
    return Loader(source, memory_bytes=options.limits.memory_bytes, seed=options.seed)


def _described(service: ServiceFile, owner: OwnedService) -> ServiceFile:
    """Return how to reach a service; whoever can ask holds its owner, so that it lives as long as its loaders."""
    return service


def _over_own(dataset: Dataset, options: JobOptions, processes: ServiceProcesses) -> Loader:
    service = processes.service_file().for_role("trainer")
    memory = HostMemory()

    def close() -> None:
        processes.close()
        memory.close()

    return _over_service(dataset, options, lambda: service, close, lambda: processes.expected_workers, memory=memory)
