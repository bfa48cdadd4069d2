"""The pages of the documentation, and how their examples are run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_FRAMEWORKS = frozenset(
    f"docs/{name}.md" for name in ("accelerate", "huggingface", "jax", "keras", "lightning", "tensorflow")
)
"""Pages whose examples need more than the tests of the core have: `make test-trainers` runs them."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_examples(page: Path) -> None:
    """Run the blocks of a page one after the other; of `pycon` blocks the output is compared."""
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        if block[1] == "python":
            exec(compile("\n" * line + block[2], str(page), "exec"), names)
            continue
        examples = doctest.DocTestParser().get_doctest(block[2], names, name_of(page), str(page), line)
        said: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(examples, out=said.append, clear_globs=False)
        names.update(examples.globs)
        assert not runner.failures, "".join(said)
