"""The crossbar: seeded random cases (a pipeline, modes, happenings) with real processes, compared with a plain run.

`python -m tests.crossbar 17 -v` prints and runs the case of seed 17; `make crossbar SEEDS=0-99` runs a hundred.
"""
