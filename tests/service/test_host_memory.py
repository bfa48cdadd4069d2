"""Large arrays of datasets and closures: in memory once per host, mapped by every worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CodecError
from penstock.core.host_memory import AttachedMemory, HostMemory, map_buffer
from penstock.graph import ops
from penstock.graph.codec import decode_graph, encode_graph
from penstock.graph.functions import UserFunction
from penstock.graph.readers import Range

LARGE = np.arange(12 << 20, dtype=np.uint8).reshape(-1, 4096)  # 12 MiB


def where(row: int) -> dict[str, Any]:
    """Say what a worker sees of the array, and how much of its memory is nobody else's."""
    found = LARGE[row]
    LARGE[row, 0] = 255  # writing is allowed, and nobody else sees it
    inode = [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "penstock buffer" in line]
    return {"sum": int(found.sum()), "inode": inode[0] if inode else "", "pid": os.getpid()}


@pytest.mark.parametrize("by_address", [False, True], ids=["service of this process", "service by its file"])
def test_workers_map_one_copy_and_what_one_writes_no_other_sees(by_address: bool) -> None:
    expected = LARGE.sum(axis=1)
    seen: list[tuple[str, int]] = []
    with ps.LocalService(workers=2) as service:
        to = service.service_file if by_address else service
        with ps.range(len(LARGE)).map(where).distribute(to) as loader:
            deadline = time.monotonic() + 60
            while len({pid for _, pid in seen}) < 2 and time.monotonic() < deadline:
                seen += [(row["inode"], row["pid"]) for row in loader]
    assert len({pid for _, pid in seen}) == 2, "both workers have read"
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


def test_arrays_behind_a_graph_are_loaded_where_they_lie_and_go_on_with_another_graph() -> None:
    held = LARGE.copy()
    node = ops.Map(upstream=Range(start=0, stop=3, step=1), function=UserFunction.of(lambda row: held[row]))
    encoded = encode_graph(node, memory=AttachedMemory())
    assert held.nbytes < len(encoded) < held.nbytes + (1 << 16)
    data = bytearray(encoded)
    loaded = decode_graph(memoryview(data))
    assert isinstance(loaded, ops.Map)
    row = loaded.function.resolve()(2)
    assert (row == held[2]).all() and np.shares_memory(row, np.frombuffer(data, np.uint8))
    sent_on = [encode_graph(loaded, memory=memory) for memory in (AttachedMemory(), HostMemory(), None)]
    for again in map(decode_graph, sent_on):
        assert isinstance(again, ops.Map)
        assert (again.function.resolve()(2) == held[2]).all()
    assert sent_on[0] == encoded


def test_a_graph_whose_arrays_are_not_all_there_is_refused() -> None:
    held = LARGE.copy()
    node = ops.Map(upstream=Range(start=0, stop=3, step=1), function=UserFunction.of(lambda row: held[row]))
    encoded = encode_graph(node, memory=AttachedMemory())
    for length in (6, 40, len(encoded) - (1 << 20)):
        with pytest.raises(CodecError, match="a damaged graph"):
            decode_graph(encoded[:length])
