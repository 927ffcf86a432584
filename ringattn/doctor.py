"""The command ``python -m ringattn.doctor``: :mod:`ringattn.tools.doctor`."""

from .tools.doctor import main

if __name__ == "__main__":
    from .tools.terminal import run

    raise SystemExit(run(main))
