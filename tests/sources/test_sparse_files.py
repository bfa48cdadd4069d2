"""Parts of files in memory: at their places, in pages that the file before left, and no more of them than needed."""

from __future__ import annotations

import mmap
import random

import pytest

import penstock as ps
from penstock.sources.sparse_files import MEMORIES_KEPT, SparseFile, SparseMemories, SparseMemory

PAGE = mmap.PAGESIZE


def write(path, pages, seed):
    content = random.Random(seed).randbytes(pages * PAGE + 17)
    path.write_bytes(content)
    return content


def at(file, start, stop):
    source = file.source()
    source.seek(start)
    return source.read(stop - start)


def test_parts_are_at_their_places_whatever_was_in_the_memory_before(tmp_path):
    memories, chance = SparseMemories(), random.Random(3)
    for number in range(8):
        pages = chance.randrange(5, 60)
        content = write(tmp_path / str(number), pages, number)
        file = SparseFile(str(tmp_path / str(number)), len(content), memories=memories)
        assert file.source().size() == len(content)
        for _ in range(4):
            cuts = sorted(chance.sample(range(len(content)), 6))
            reads = list(zip(cuts[::2], cuts[1::2]))
            file.fill(reads)
            assert all(at(file, *read) == content[slice(*read)] for read in reads)
            file.drop(reads)
        file.close()


def test_what_is_still_needed_stays_though_its_page_is_shared(tmp_path):
    content = write(tmp_path / "f", 8, 1)
    file = SparseFile(str(tmp_path / "f"), len(content))
    tail, middle = (7 * PAGE + 9, len(content)), (2 * PAGE + 5, 7 * PAGE + 9)
    file.fill([tail])
    file.fill([middle])
    file.drop([middle])
    file.fill([(0, 10)])
    assert at(file, *tail) == content[slice(*tail)]


def test_the_memory_of_a_closed_file_is_that_of_the_next_and_what_it_does_not_read_is_given_back(tmp_path):
    memories = SparseMemories()
    pages = []
    for number, reads in enumerate([[(0, 20 * PAGE)], [(5 * PAGE, 10 * PAGE), (18 * PAGE, 22 * PAGE)]]):
        content = write(tmp_path / str(number), 22, number)
        file = SparseFile(str(tmp_path / str(number)), len(content), memories=memories)
        file.fill(reads)
        pages.append(file._memory.pages)
        assert file._memory.filled_bytes == sum(stop - start for start, stop in reads)
        assert resident_pages(pages[-1]) == file._memory.filled_bytes // PAGE
        file.close()
    assert pages[0] is pages[1]


def resident_pages(memory):
    """Return how many pages are not zero throughout: what was given back is."""
    return sum(memory[start : start + PAGE] != bytes(PAGE) for start in range(0, len(memory), PAGE))


def test_no_more_than_a_few_memories_are_kept_and_the_smallest_that_fits_is_taken():
    memories = SparseMemories()
    made = [SparseMemory(pages * PAGE) for pages in (50, 10, 20, 30)]
    for memory in made:
        memories.give(memory)
    assert MEMORIES_KEPT == 2
    assert memories.take(15 * PAGE) is made[2]
    assert memories.take(15 * PAGE) is made[3]
    assert memories.take(15 * PAGE) not in made


def test_a_file_that_ends_too_early_is_told(tmp_path):
    content = write(tmp_path / "f", 3, 1)
    file = SparseFile(str(tmp_path / "f"), len(content))
    with open(tmp_path / "f", "r+b") as opened:
        opened.truncate(PAGE)
    with pytest.raises(ps.TruncatedFileError, match=f"it ends at byte {PAGE}"):
        file.fill([(0, 2 * PAGE)])
    file.close()
    file.close()
