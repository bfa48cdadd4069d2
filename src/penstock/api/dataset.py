"""`Dataset`: describe a pipeline operator by operator, and read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import signature
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from penstock.api.operators import Face, Function, Operators, leading, nodes_of, user_function
from penstock.core.checks import check_processes
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, choice
from penstock.core.records import unknown_argument
from penstock.graph import ops

if TYPE_CHECKING:
    from penstock.api.iteration import DatasetIterator
    from penstock.api.loader import Loader
    from penstock.api.saving import SavedDataset
    from penstock.api.services import OwnedService
    from penstock.submission.options import Limits
    from penstock.wire.modes import Access, Order, Placement, Policy, Ranks, Sharding, Share, Transport


P = ParamSpec("P")
R = TypeVar("R")


def _names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Have an unknown argument of a function of many answered with the one that was meant.

    >>> @_names_arguments
    ... def read(*, order="relaxed", ranks=None): ...
    >>> read(rank=3)
    Traceback (most recent call last):
        ...
    TypeError: read() has no argument 'rank'; did you mean ranks=? It takes order, ranks
    """
    known = [name for name in signature(function).parameters if name != "self"]

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(function.__name__, name, known)
        return function(*args, **kwargs)

    return called


class Dataset(Operators):
    """An immutable pipeline. `for element in dataset` runs it in this process; each iteration is the next epoch."""

    def __iter__(self) -> Iterator[Element]:
        return self.iterator()

    def iterator(
        self,
        *,
        epoch: int | None = None,
        seed: int | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        optimize: bool = True,
    ) -> DatasetIterator:
        """Return an iterator with `state_dict`, `load_state_dict`, `statistics` and `close`.

        `epoch` defaults to the one after the last iteration's, `threads` to the cores and `memory_bytes`, what may be
        buffered between stages, to a tenth of the memory this process may use. `threads=1` runs all in this thread.
        """
        from penstock.api.iteration import DatasetIterator

        return DatasetIterator(
            self._plan, epoch=epoch, seed=seed, threads=threads, memory_bytes=memory_bytes, optimize=optimize
        )

    @_names_arguments
    def distribute(
        self,
        to: int | str | PathLike[str] | OwnedService | None = None,
        *,
        job: str | None = None,
        ranks: Ranks | None = None,
        order: Order = "relaxed",
        seed: int | None = None,
        sharding: Policy | Callable[[Sequence[Any], int], Sequence[Sequence[int]]] | Sharding = "dynamic",
        sharing: Share | None = None,
        feed: Any = None,
        placement: Placement | None = None,
        transport: Transport = "auto",
        limits: Limits | None = None,
        access: Access | None = None,
    ) -> Loader:
        """Read this dataset through a service, and return the loader to iterate over.

        `to` is a service's address or file, a `LocalService`, a number of worker processes of the loader's own, or
        None: what $PENSTOCK_SERVICE names, else threads in this process. docs/options.md has all that may be said:

        - `job` names what processes read together; `ranks` says how many they are, and which of them this one is.
        - `order` "deterministic" gives the same elements in the same order each time; `seed` is that of all random
          numbers, where the pipeline has none of its own.
        - `sharding` says which worker reads what: a policy, a function of splits and workers, or a `ps.Sharding`.
        - `sharing`: several trainers read what is made once, each all of it.
        - `feed`: this process's own sampler (of indices, or lists of them; or a function of the epoch that returns
          one) says what is read, in its order; or a `ps.Feed`.
        - `placement`, `transport` and `limits`: which workers serve it, how bytes travel, how long and how much.
        - `access`: who else may read the job, and whose job this process may join.
        """
        # Imported here: a loader is a dataset, and most datasets never leave the process.
        from penstock.submission.options import check_options

        options = check_options(
            job=job,
            ranks=ranks,
            order=order,
            seed=seed,
            sharding=sharding,
            sharing=sharing,
            feed=feed,
            placement=placement,
            transport=transport,
            limits=limits,
            access=access,
        )
        if options.feed is not None:
            from penstock.api.loader import reads_here
            from penstock.samplers.pipelines import check_fed, check_fed_here

            (check_fed_here if reads_here(to) else check_fed)(self._node)
        processes = None
        if isinstance(to, int) and not isinstance(to, bool):
            if to < 1:
                raise InvalidArgumentError(f"to={to} must be at least 1 worker process; None reads with threads here")
            check_processes("to", to, 1)
            from penstock.processes.nursery_start import start_own_service

            # All that can be wrong is checked; and this process has not imported yet what reads from them.
            processes = start_own_service(to, warm=",".join(ops.transforms_in(self._node)))
        try:
            from penstock.api.loader import make_loader

            return make_loader(self, to, options, processes)
        except BaseException:
            if processes is not None:
                processes.close()
            raise

    def evaluation(
        self,
        batch_size: int,
        to: int | str | PathLike[str] | OwnedService | None = None,
        *,
        ranks: Ranks | None = None,
        mask: str = "mask",
        collate: Callable[..., Any] | None = None,
        job: str | None = None,
    ) -> Loader:
        """Return a loader for evaluation: every element once over all ranks, in a fixed order, in equal batches.

        All batches have `batch_size` rows and a column `mask`: rows where it is False are copies that fill up a batch,
        or a rank's last step where another rank has one more. So all ranks take the same number of steps, and summing
        over `mask` counts each element once. Elements are dicts. `to` is as in `distribute`.
        """
        from penstock.api.evaluating import evaluation_loader

        return evaluation_loader(self, batch_size, to, ranks=ranks, mask=mask, collate=collate, job=job)

    def save(
        self,
        to: int | str | PathLike[str] | OwnedService | None,
        path: str | PathLike[str],
        *,
        rows_per_file: int = 1024,
        job: str | None = None,
        timeout_s: float | None = None,
        progress: bool = True,
    ) -> SavedDataset:
        """Have a service write one epoch of this dataset into a folder, each element once; `read_saved` reads it.

        `to` is as in `distribute`; its workers and this process must share the folder. Called again after it was
        killed, it goes on. Files hold `rows_per_file` elements; where those are batches, each is a file of its own.
        `timeout_s` makes waiting for the next file an error; `progress` shows on a terminal how far it is.
        """
        from penstock.api.saving import save_dataset

        return save_dataset(
            self, to, fspath(path), rows_per_file=rows_per_file, job=job, timeout_s=timeout_s, progress=progress
        )

    @property
    def schema(self) -> dict[str, str]:
        """What an element holds: each leaf by its path, and its type.

        Columns of `read_parquet` and `read_arrow` have their types in Arrow, as the files say. Where those do not tell,
        the first element is made and looked at: types are those of numpy, with shapes, or of Python.
        """
        known = self._plan.schema
        if known is not None:
            return known
        from penstock.api.looking import described

        return described(self.peek())

    def peek(self) -> Element:
        """Return the element that the next iteration begins with; it stays the next one.

        >>> import penstock as ps
        >>> ds = ps.range(3).map(lambda x: x + 1)
        >>> ds.peek(), list(ds)
        (1, [1, 2, 3])
        """
        from penstock.api.looking import first_element

        return first_element(self._plan)

    def __getitem__(self, index: int) -> Element:
        """Return element number `index` of the next iteration, where the source is indexable; it alone is made."""
        from penstock.api.looking import element_at

        return element_at(self._plan, index)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the labels 0, 1, ... of `read_images`; None where there are none."""
        return self._plan.classes


def mix(
    datasets: Sequence[Face],
    weights: Sequence[float] | None = None,
    *,
    unit: Literal["elements"] | Function = "elements",
    stop: ops.MixStop = "first",
) -> Face:
    """Mix datasets in proportion to `weights`, measured in elements or by a size function."""
    chosen = tuple(weights) if weights is not None else (1.0,) * len(datasets)
    if isinstance(unit, str) and unit != "elements":
        raise choice("unit", unit, ("elements", "a function of an element"))
    size = None if isinstance(unit, str) else user_function("mix", unit)
    node = ops.Mix(upstreams=nodes_of("mix", *datasets), weights=chosen, unit=size, stop=stop)
    return leading(*datasets)._over(node)
