"""The command ``python -m ringattn.planner``, and the memory model for scripts: :mod:`ringattn.tools.planner`."""

from .tools.planner import memory as memory
from .tools.planner import model_shapes as models
from .tools.planner.command import main

__all__ = ["main", "memory", "models"]

if __name__ == "__main__":
    from .tools.terminal import run

    raise SystemExit(run(main))
