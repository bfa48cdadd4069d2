"""A trainer that follows a table: `python -m tests.warehouse.following_program TABLE FILE`.

After each batch it puts the keys that it has trained on and its state into FILE, at once. It never ends by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import penstock as ps
from tests.warehouse.session_kit import make_session


def follow(url: str, saved: Path) -> None:
    trained = {"keys": [], "state": None}
    session = make_session(ps.Table(url), label="key", batch=10, follow=True)
    if saved.exists():
        trained = json.loads(saved.read_text())
    with session.open(poll_s=0.02) as reader:
        if trained["state"] is not None:
            reader.load_state_dict(trained["state"])
        for batch in reader:
            trained = {"keys": [*trained["keys"], *batch["key"].tolist()], "state": reader.state_dict()}
            draft = saved.with_suffix(".draft")
            draft.write_text(json.dumps(trained))
            os.replace(draft, saved)


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]))
