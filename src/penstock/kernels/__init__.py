"""Kernels of feature transforms: arrays in, arrays out, compiled, and without the GIL.

What a transform is called and takes is declared in `graph.transforms`; what it means is written here, on
[features](../../../docs/features.md), and once more, in plain Python, in the tests that compare the two.
"""
