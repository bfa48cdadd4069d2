"""Elements that need not be made again, of a source that is read by index. See `keeping` for what is read by splits.

Under a full permutation a split holds other elements in every pass, so that each element is known by itself, and lies
in a pack (`caching.packs`) on the host that made it. A chunk's elements are all made, or none is; those that other
hosts have are asked for all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from penstock.caching.claims import PrefixUse
from penstock.caching.elsewhere import OtherHosts
from penstock.caching.entries import DamagedEntryError, decode_frame, encode_frame
from penstock.caching.names import subject_of
from penstock.caching.packs import PACK_BYTES, PackIndex, pack_index
from penstock.caching.writing import EntryWriting
from penstock.core.element import Element
from penstock.core.errors import CodecError
from penstock.runtime.contract import Chunk
from penstock.runtime.keeping import PASS_END, CachePoint, Chooses, SplitVisit, tell_choice
from penstock.runtime.rechecking import Recheck, is_due, these
from penstock.sources.base import IndexableSource
from penstock.sources.stamps import element_stamps

SHARE_EVERY_S = 1.0  # what is made is told to other jobs that use the same prefix, and theirs is looked for
TRIED_BYTES = 1 << 20  # a pack's, when entries are written to see how fast they are


@dataclass(slots=True)
class _Sharing:
    look_at: float
    use: PrefixUse | None = None


class ElementKeeping:
    """For a source that is read by index."""

    def __init__(self, points: Sequence[CachePoint], choice: Chooses, hosts: OtherHosts | None, job: str) -> None:
        """`job`: what other jobs know this one by."""
        self._points = points
        self._job = job
        self._sharing: dict[int, _Sharing] = {}
        self._hosts = hosts
        self._choice = choice
        self._indices: dict[int, PackIndex] = {p.number: pack_index(p.store, p.prefix) for p in points}
        self._packs: dict[int, EntryWriting | None] = {}
        self._ends: set[int] = set()
        """Points whose packs end with the next element, because another job may need what is in them."""
        self.frozen = any(point.frozen for point in points)
        self.highest = len(points)
        """The number of the last point on the way to the reader."""

    def reset(self) -> None:
        for index in self._indices.values():
            index.refresh()

    def at(
        self, source: IndexableSource, indices: Sequence[int], place: int
    ) -> tuple[SplitVisit, int, Sequence[Element] | None]:
        """Return the visit of the first of some elements, how many they are, and the elements, if they are kept.

        Either all of them are, or none.
        """
        visit = SplitVisit(place)
        chosen = self._choice.point()
        point = next((point for point in self._points if point.number == chosen), None)
        if point is None:
            return visit, len(indices), None
        subjects = self._subjects(point, source, indices)
        id_of, packs = point.store.secret.id_of, self._indices[chosen]
        keys = [None if subject is None else id_of(subject) for subject in subjects]
        here = [key is not None and packs.has(key) for key in keys]
        if packs.is_outdated and not all(here):
            packs.refresh()
            here = [key is not None and packs.has(key) for key in keys]
        elsewhere = self._from_others(point, [s for s, found in zip(subjects, here) if s is not None and not found])
        there = [found or subject in elsewhere for found, subject in zip(here, subjects)]
        count = next((k for k, found in enumerate(there) if found != there[0]), len(there))
        if there[0]:
            due = next((k for k, index in enumerate(indices[:count]) if is_due(place, int(index))), count)
            if not due and keys[0] is not None and here[0]:
                kept = packs.read([keys[0]])
                visit.recheck = Recheck(these([(int(indices[0]), each) for each in kept or ()]))
                visit.compared_at = chosen
                return visit, 1, None
            count = max(1, due)
            own = packs.read([key for key, found in zip(keys[:count], here) if found and key is not None])
            if own is not None:
                point.store.counts.count(hits=count, fetched=count - len(own))
                visit.made_at = chosen
                mine = iter(own)
                return visit, count, [next(mine) if found else elsewhere[s] for found, s in zip(here[:count], subjects)]
        point.store.counts.count(misses=count)
        self._share(point)
        visit.put_at = chosen
        visit.keys = {int(index): key for index, key in zip(indices[:count], keys) if key is not None}
        return visit, count, None

    def _share(self, point: CachePoint) -> None:
        """Look, now and then, for what other jobs publish meanwhile, and publish what is made here."""
        now, found = monotonic(), self._sharing.get(point.number)
        if found is None:
            found = self._sharing[point.number] = _Sharing(now + SHARE_EVERY_S)
            found.use = point.store.wait(point.store.ask(lambda: point.store.claims.use(point.prefix, self._job)))
        use = found.use
        if now >= found.look_at and use is not None and not point.store.away:
            found.look_at = now + SHARE_EVERY_S
            if point.store.wait(point.store.ask(use.has_others)):
                self._indices[point.number].refresh()
                self._ends.add(point.number)

    def _subjects(self, point: CachePoint, source: IndexableSource, indices: Sequence[int]) -> list[bytes | None]:
        return [
            None if stamp is None else subject_of(point.key, stamp, str(index) if point.frozen else "")
            for index, stamp in zip(indices, element_stamps(source, indices))
        ]

    def _from_others(self, point: CachePoint, subjects: Sequence[bytes]) -> Mapping[bytes | None, Element]:
        """Return those of some elements that other hosts have and gave."""
        if not subjects or self._hosts is None or not point.asks_others:
            return {}
        found: dict[bytes | None, Element] = {}
        for subject, frame in self._hosts.frames(point.key, subjects).items():
            try:
                (found[subject],) = decode_frame(frame)
            except (CodecError, DamagedEntryError, ValueError):
                continue
            point.store.counts.count(got_bytes=len(frame))
        return found

    def went_through(self, point: CachePoint, visit: SplitVisit, count: int) -> None:
        """Elements have passed a point; the last one tells what decides."""
        tell_choice(self._choice, self.highest, point, visit, count)

    def keep(self, point: CachePoint, chunk: Chunk, visit: SplitVisit) -> None:
        assert chunk.idents is not None
        for element, index in zip(chunk.elements, chunk.idents[:, 1].tolist()):
            key = visit.keys.get(index)
            if key is None:
                continue
            pack = self._packs.get(point.number)
            if pack is None or pack.given_up:
                pack = self._packs[point.number] = self._begin(point)
            if pack is None:
                point.store.counts.count(left=1)
                return
            try:
                frame = encode_frame([element])
            except CodecError:
                return
            if pack.add(frame, 1, ids=[key]) and self._is_full(point, pack):
                self._end_pack(point)

    def _begin(self, point: CachePoint) -> EntryWriting | None:
        name = f"{point.prefix}/{point.store.new_name()}.entry"
        found: list[EntryWriting] = []

        def saves() -> float:
            return found[0].elements * point.compute_s_each() / max(1, found[0].nbytes) if found else 0.0

        made = point.store.write(point.prefix, name, point.label, saves)
        if made is not None:
            found.append(made)
        return made

    def _is_full(self, point: CachePoint, pack: EntryWriting) -> bool:
        if point.number in self._ends:
            self._ends.discard(point.number)
            return True
        return pack.nbytes >= (TRIED_BYTES if self._choice.trying else PACK_BYTES)

    def _end_pack(self, point: CachePoint) -> None:
        pack = self._packs.pop(point.number, None)
        if pack is not None and pack.elements:
            pack.finish(pack.elements * point.compute_s_each())

    def finish(self, point: CachePoint, visit: SplitVisit) -> None:
        """Packs end when they are full."""

    def passed(self, point: CachePoint, visit: SplitVisit) -> Sequence[SplitVisit]:
        if visit is PASS_END:
            self._end_pack(point)
        return ()

    def interrupted(self) -> None:
        """An element is kept or not, whatever became of its neighbours."""

    def close(self, point: CachePoint) -> None:
        if point.number == self.highest:
            self._choice.close()
        self._end_pack(point)
        self._indices[point.number].close()
        sharing = self._sharing.pop(point.number, None)
        if sharing is not None and sharing.use is not None:
            sharing.use.close()
