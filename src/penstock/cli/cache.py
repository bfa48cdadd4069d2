"""`penstock cache`: what autocache() keeps on this host, or at a location."""

from __future__ import annotations

import argparse
from collections import defaultdict
from time import time

from penstock.caching.catalogue import CatalogueEntry
from penstock.caching.entries import DamagedEntryError
from penstock.caching.probe import FACT, StorageProbe
from penstock.caching.store import CacheStore, open_store

PREFIX_CHARACTERS = 12


def run_cache(options: argparse.Namespace) -> int:
    store = open_store(options.location, options.scope)
    store.rebuild()
    match options.action:
        case "ls":
            return _list(store)
        case "why":
            return _explain(store)
        case "verify":
            return _verify(store)
        case "pin" | "unpin":
            return _pin(store, options.prefix, pinned=options.action == "pin")
        case "rm":
            return _remove(store, options.prefix)
    raise AssertionError(options.action)


def _list(store: CacheStore) -> int:
    by_prefix: dict[str, list[CatalogueEntry]] = defaultdict(list)
    for entry in store.catalogue.entries():
        by_prefix[entry.prefix].append(entry)
    print(f"{store.location}: room for {store.capacity_bytes / 1e9:.1f} GB")
    for prefix, entries in sorted(by_prefix.items()):
        nbytes, saved = sum(e.nbytes for e in entries), sum(e.compute_s for e in entries)
        used_s = time() - max(e.used_at_s for e in entries)
        pinned = " pinned" if any(e.pinned for e in entries) else ""
        print(
            f"{prefix[:PREFIX_CHARACTERS]}  {len(entries)} entries  {sum(e.elements for e in entries)} elements  "
            f"{nbytes / 1e6:.1f} MB  saves {saved:.1f} s an epoch  used {used_s / 3600:.1f} h ago{pinned}  "
            f"{entries[0].label}"
        )
    return 0


def _explain(store: CacheStore) -> int:
    """Print what decisions here rest on."""
    known = store.catalogue.fact(FACT)
    if known is None:
        print(f"{store.location}: its storage was not measured yet; a pipeline with autocache() does it")
    else:
        import msgspec

        probe = msgspec.json.decode(known, type=StorageProbe)
        print(f"{store.location}: measured {(time() - probe.at_s) / 3600:.1f} h ago, in {probe.took_s:.2f} s")
        for speed in probe.speeds:
            way = "writes" if speed.writes else "reads"
            print(
                f"  {way} of {speed.nbytes >> 10} KB, {speed.parallel} at once: {speed.bytes_per_s / 1e6:.0f} MB/s, "
                f"{speed.latency_s * 1e3:.2f} ms"
            )
    for name, value in store.catalogue.facts("choice "):
        print(f"{name.removeprefix('choice ')[:PREFIX_CHARACTERS]}  {value}")
    return 0


def _verify(store: CacheStore) -> int:
    damaged = 0
    names = sorted(store.catalogue.names())
    for name in names:
        try:
            entry = store.files.open(name)
            if entry is not None:
                entry.check()
                entry.close()
        except DamagedEntryError as error:
            damaged += 1
            store.files.remove(name, though_read=True)
            store.catalogue.remove(name)
            print(f"{name}: {error}; removed, and computed when it is needed")
    print(f"{len(names)} entries read, {damaged} damaged")
    return 1 if damaged else 0


def _pin(store: CacheStore, prefix: str, *, pinned: bool) -> int:
    found = store.catalogue.pin(prefix, pinned)
    print(f"{found} entries are {'pinned: nothing takes their place' if pinned else 'no longer pinned'}")
    return 0 if found else 1


def _remove(store: CacheStore, prefix: str) -> int:
    found = [entry for entry in store.catalogue.entries() if entry.prefix.startswith(prefix)]
    removed = [entry for entry in found if store.files.remove(entry.name)]
    for entry in removed:
        store.catalogue.remove(entry.name)
    held = len(found) - len(removed)
    print(f"{len(removed)} entries removed, {sum(e.nbytes for e in removed) / 1e6:.1f} MB")
    if held:
        print(f"{held} are being read, and were left")
    return 0 if removed else 1
