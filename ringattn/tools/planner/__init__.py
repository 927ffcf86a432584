"""The planner: what a training step over many GPUs takes in time and memory, said before a run and without a GPU.

``python -m ringattn.planner --help``; docs/reference/planner.md.
"""
