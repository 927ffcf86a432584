"""The command ``ringattn``, which pip installs, or ``python -m ringattn``: ``doctor`` and ``plan``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from .terminal import run

COMMANDS = {
    "doctor": ("doctor", "check this machine: about 20 seconds, with a GPU 25, or 40"),
    "plan": ("planner.command", "predict time and memory of training or generation: some seconds, no GPU"),
}


def main(argv: list[str] | None = None, name: str = "ringattn") -> int:
    """Run a command with the arguments that follow its name, and return its exit status. ``name``: how this is started;
    without a command it says which there are."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in COMMANDS:
        parser = argparse.ArgumentParser(prog=name, description=__doc__)
        commands = parser.add_subparsers(required=True, help="with --help after it: its options")
        for command_name, (_, text) in COMMANDS.items():
            commands.add_parser(command_name, help=text)
        parser.parse_args(words or ["--help"])  # prints and exits
    command: Callable[[list[str], str], int] = import_module(f".{COMMANDS[words[0]][0]}", __package__).main
    return run(lambda: command(words[1:], f"{name} {words[0]}"))
