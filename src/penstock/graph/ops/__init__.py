"""Every operator that transforms, combines or regroups elements, as one namespace. Sources are in `graph.readers`.

An operator is a class in one of these modules, and found here by being there: `docs/architecture.md` has the five edits
that add one, and `tests/test_totality.py` fails until all of them exist.
"""

from penstock.graph.ops.autocaching import *  # noqa: F403
from penstock.graph.ops.base import *  # noqa: F403
from penstock.graph.ops.batches import *  # noqa: F403
from penstock.graph.ops.children import *  # noqa: F403
from penstock.graph.ops.columns import *  # noqa: F403
from penstock.graph.ops.combining import *  # noqa: F403
from penstock.graph.ops.counting import *  # noqa: F403
from penstock.graph.ops.features import *  # noqa: F403
from penstock.graph.ops.functions import *  # noqa: F403
from penstock.graph.ops.fused import *  # noqa: F403
from penstock.graph.ops.holding_out import *  # noqa: F403
from penstock.graph.ops.passing import *  # noqa: F403
from penstock.graph.ops.windows import *  # noqa: F403
