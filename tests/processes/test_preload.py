"""$PENSTOCK_PRELOAD: what runners have from the nursery, so that none of them imports it."""

from __future__ import annotations

import sys

import penstock as ps

MODULE = "xmlrpc.server"  # nothing of ours imports it


def test_runners_have_what_the_nursery_was_told_to_import(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PRELOAD", f"no.such.module, {MODULE}")

    def is_there(_):
        return MODULE in sys.modules

    assert list(ps.range(1).map(is_there)) == [False]
    with ps.range(1).map(is_there).distribute(1) as loader:
        assert list(loader) == [True]
