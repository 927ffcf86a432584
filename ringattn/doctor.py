"""The command ``python -m ringattn.doctor``: :mod:`ringattn.tools.doctor`."""

from .tools.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
