from __future__ import annotations

from importlib.util import find_spec

import pytest

from penstock.core.errors import InvalidPipelineError
from penstock.graph import readers
from penstock.graph.readers import Range, SourceNode
from penstock.sources.registry import IMPLEMENTATIONS, open_source, source_digest


def test_every_source_node_has_an_implementation() -> None:
    nodes = {kind for kind in vars(readers).values() if isinstance(kind, type) and issubclass(kind, SourceNode)}
    bases = {kind for kind in nodes if any(other is not kind and issubclass(other, kind) for other in nodes)}
    assert nodes - bases == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("where", IMPLEMENTATIONS.values())
def test_every_implementation_is_there(where: str) -> None:
    assert find_spec(f"penstock.sources.{where.partition('.')[0]}") is not None


def test_a_node_nobody_reads_is_named() -> None:
    class ReadMinds(SourceNode, frozen=True, kw_only=True, eq=False):
        pass

    with pytest.raises(InvalidPipelineError, match="ReadMinds"):
        open_source(ReadMinds())


def test_the_digest_tells_ranges_apart() -> None:
    digests = {source_digest(open_source(Range(start=0, stop=stop))) for stop in (10, 11, 10)}
    assert len(digests) == 2
