"""The command ``python -m ringattn.planner``: :mod:`ringattn.tools.planner`."""

from .tools.planner.command import main

if __name__ == "__main__":
    raise SystemExit(main())
