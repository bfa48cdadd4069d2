"""Penstock for JAX: batches as pytrees of arrays on devices, put there in the background, sharded over a mesh."""

from penstock.jax.arrays import ArrayLoader, arrays

__all__ = ["ArrayLoader", "arrays"]
