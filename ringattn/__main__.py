"""The command ``python -m ringattn``: :mod:`ringattn.tools.commands`."""

from .tools.commands import main

if __name__ == "__main__":
    raise SystemExit(main(name="python -m ringattn"))
