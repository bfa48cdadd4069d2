"""Importing this compiles the kernels of the transforms that $PENSTOCK_WARM_KERNELS names, with commas between them.

A nursery imports it before it forks runners for a job that has transforms: they share what is compiled.
"""

from __future__ import annotations

import os

from penstock.kernels.catalog import kernels_of

for _kernel in kernels_of(os.environ.get("PENSTOCK_WARM_KERNELS", "").split(",")):
    _kernel.ready()
