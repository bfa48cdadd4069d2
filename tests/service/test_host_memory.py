"""Large arrays of datasets and closures: in memory once per host, mapped by every worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.host_memory import HostMemory, map_buffer
from penstock.graph import ops
from penstock.graph.codec import decode_graph, encode_graph
from penstock.graph.functions import UserFunction
from penstock.graph.readers import Range

LARGE = np.arange(4 << 20, dtype=np.uint8).reshape(-1, 1024)  # 4 MiB


def where(row: int) -> dict[str, Any]:
    """Say what a worker sees of the array, and how much of its memory is nobody else's."""
    found = LARGE[row]
    LARGE[row, 0] = 255  # writing is allowed, and nobody else sees it
    inode = [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "penstock buffer" in line]
    return {"sum": int(found.sum()), "inode": inode[0] if inode else "", "pid": os.getpid()}


def test_workers_map_one_copy_and_what_one_writes_no_other_sees() -> None:
    expected = LARGE.sum(axis=1)
    seen = []
    with ps.LocalService(workers=2) as service, ps.range(len(LARGE)).map(where).distribute(service) as loader:
        for _ in range(2):
            seen += [(row["inode"], row["pid"]) for row in loader]
    assert len({inode for inode, _ in seen}) == 1 and seen[0][0]
    assert (LARGE.sum(axis=1) == expected).all()


def test_the_bytes_of_a_graph_hold_no_large_array_and_are_loaded_with_it() -> None:
    held = LARGE.copy()
    node = ops.Map(upstream=Range(start=0, stop=3, step=1), function=UserFunction.of(lambda row: int(held[row].sum())))
    memory = HostMemory()
    encoded = encode_graph(node, memory=memory)
    assert len(encoded) < 1 << 16 < held.nbytes < len(encode_graph(node))
    loaded = decode_graph(encoded)
    assert isinstance(loaded, ops.Map)
    function = loaded.function.resolve()
    memory.close()  # who has mapped it keeps it
    assert function(2) == int(held[2].sum())


def test_memory_of_a_process_that_is_gone_is_an_error_with_the_remedy() -> None:
    held = LARGE.copy()
    node = ops.Map(upstream=Range(start=0, stop=3, step=1), function=UserFunction.of(lambda row: held[row]))
    memory = HostMemory()
    encoded = encode_graph(node, memory=memory)
    memory.close()
    loaded = decode_graph(encoded)
    assert isinstance(loaded, ops.Map)
    with pytest.raises(ps.FunctionShippingError, match="lives as long as its workers"):
        loaded.function.resolve()


def test_a_mapped_buffer_can_be_written_and_the_original_stays() -> None:
    memory = HostMemory()
    buffer = memory.put(memoryview(b"abc"))
    mapped = map_buffer(buffer)
    mapped[0] = ord("x")
    assert mapped[:] == b"xbc" and map_buffer(buffer)[:] == b"abc"
    memory.close()


def test_a_large_tensor_is_mapped_too() -> None:
    torch = pytest.importorskip("torch")
    held = torch.arange(1 << 20)
    node = ops.Map(upstream=Range(start=0, stop=3, step=1), function=UserFunction.of(lambda row: held[row]))
    memory = HostMemory()
    encoded = encode_graph(node, memory=memory)
    assert len(encoded) < 1 << 16
    loaded = decode_graph(encoded)
    assert isinstance(loaded, ops.Map)
    assert loaded.function.resolve()(2) == held[2]
    memory.close()


def test_a_program_that_is_killed_leaves_no_buffer_behind(tmp_path: Path) -> None:
    program = (
        "import numpy, os, signal; from penstock.core.host_memory import HostMemory; "
        "HostMemory().put(memoryview(numpy.ones(2 << 20, numpy.uint8))); os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = set(os.listdir("/dev/shm"))
    subprocess.run([sys.executable, "-c", program], check=False, cwd=tmp_path)
    assert set(os.listdir("/dev/shm")) <= before
