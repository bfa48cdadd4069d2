"""What to compute: immutable operators, user functions, fingerprints and the codec. Building a graph runs nothing."""
