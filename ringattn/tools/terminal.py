"""What commands share: their parser of options, and tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description as it is written, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        none = action.default is None or action.default is False or action.default == []
        return (action.help or "") if none else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser of the options of a module. Its usage line says how the module is started.

    Args:
        module: as ``"scripts.train"``; or with a space a command of its own, as ``"ringattn plan"``.
        description: the module's docstring.
        options: further ones of :class:`argparse.ArgumentParser`.
    """

    def __init__(self, module: str, description: str | None, **options: Any) -> None:
        prog = module if " " in module or "/" in module else f"python -m {module}"
        super().__init__(prog=prog, description=description, formatter_class=_Help, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        if options.get("default") not in (None, False, []):
            options.setdefault("help", "default: %(default)s")  # argparse shows no default of options without a text
        return super().add_argument(*names, **options)


def existing(what: str, is_one: Callable[[str], bool] = os.path.isfile) -> Callable[[str], Path]:
    """Return the ``type`` of an argument that names a file which is read: ``what`` is to be given, for the error; or,
    with ``os.path.isdir``, a folder."""

    def path(text: str) -> Path:
        if not is_one(text) or not os.access(text, os.R_OK):
            kind = "folder" if is_one is os.path.isdir else "file"
            raise argparse.ArgumentTypeError(f"there is no {kind} {text} that can be read; give {what}")
        return Path(text)

    return path


def run(main: Callable[[], int]) -> int:
    """Return the exit status of a command: quietly 130 after Ctrl-C, and 141 if nobody reads its output any more."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is written when the interpreter ends
        return 141
    return status


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines in which columns have the width of their widest entry, two spaces apart.

    The standard library has no such function, and rich is not among the dependencies.

    Args:
        head: names of the columns.
        rows: of as many texts each, or of fewer.
        left: so many first columns are aligned to the left, others to the right, except what follows the head's last.
    """
    widths = [max(len(row[i]) for row in (head, *rows) if i < len(row)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=False))]
        lines.append("  ".join([*cells, *row[len(head) :]]).rstrip())
    return lines
