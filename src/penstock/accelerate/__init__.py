"""Penstock for Accelerate: loaders that stay what they are, place their batches, and go into its checkpoints.

accelerator = accelerate.Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
loader = ps.accelerate.prepare(accelerator, loader)
"""

from penstock.accelerate.preparing import AcceleratedLoader, prepare, skip_first_batches

__all__ = ["AcceleratedLoader", "prepare", "skip_first_batches"]
