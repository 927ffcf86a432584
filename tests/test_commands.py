"""Every command: its usage line says how it is started, --help shows defaults, and unknown options are refused."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import signal
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ringattn.tools import commands, terminal
from ringattn.tools.terminal import Parser, run, table
from scripts import ranks

ROOT = Path(__file__).resolve().parents[1]
STARTED = 'if __name__ == "__main__":'
FOLDERS = ("scripts", "scripts/launch", "benchmarks", "ringattn")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.py")
    if STARTED in path.read_text()
)
USAGE = {  # how others than modules are started
    "ringattn.__main__": "python -m ringattn",
    "scripts.train": "./scripts/demo",
    "scripts.ten_lines": "torchrun --standalone --nproc-per-node 2 scripts/ten_lines.py",
}


@pytest.fixture
def handlers() -> Iterator[None]:
    """Commands may handle signals, which pytest must get again."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def start(module: str, *words: str) -> int:
    """Run a command in this process, and return its exit status."""
    with (
        mock.patch.object(sys, "argv", [module, *words]),
        mock.patch.object(ranks, "leave", side_effect=sys.exit),
        mock.patch.dict("os.environ"),
        pytest.raises(SystemExit) as end,
    ):
        runpy.run_module(module, run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(end.value.code or 0)


def test_there_are_commands() -> None:
    assert {"ringattn.doctor", "ringattn.planner", "scripts.check", "scripts.launch.ray_train"} <= set(MODULES)
    assert {"scripts.ten_lines", "benchmarks.libraries"} <= set(MODULES)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("module", MODULES)
def test_a_command_says_how_it_is_started_and_refuses_what_it_does_not_know(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    for name in ("RANK", "WORLD_SIZE"):  # nor torchrun: help comes first
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert start(module, "--help") == 0
    usage = f"usage: {USAGE.get(module, f'python -m {module}')} "
    assert capsys.readouterr().out.startswith(usage)
    assert start(module, "--no-such-flag") == 2
    error = capsys.readouterr().err
    assert error.startswith(usage)
    assert re.search(r"unrecognized arguments: --no-such-flag|arguments are required|is required", error)


def test_there_is_one_kind_of_parser() -> None:
    """That of the command ``ringattn`` has no options."""
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    others = {path.name for path in files if "ArgumentParser(" in path.read_text()}
    assert others == {"commands.py"}


OUTPUTS = {"folder", "picture", "--out", "--report"}  # what is written; or "no lines of ... in" them is said


def test_files_that_commands_read_are_named_where_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    paths = re.compile(r'add_argument\(\s*"([\w-]+)"[^)]*?type=(?:Path|pathlib\.Path)\b')
    sources = [path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert {name for text in sources for name in paths.findall(text)} <= OUTPUTS, "type=terminal.existing(...)"
    nothing, folder = tmp_path / "nope.json", tmp_path
    for module, *words in (
        ("ringattn.planner", "--context", "4k", "--config", "{}"),
        ("ringattn.planner", "--context", "4k", "--model", "llama-3.1-8b", "--calibration", "{}"),
        ("scripts.ten_lines", "{}"),
        ("benchmarks.plot_decode", "{}", "decode.png"),
        ("benchmarks.bars", "--gpus", "4", "{}"),
    ):
        for given in (nothing, folder) if module != "benchmarks.bars" else (nothing,):
            assert start(module, *(word.format(given) for word in words)) == 2, (module, words)
            error = capsys.readouterr().err
            assert re.search(rf"there is no (file|folder) {given} that can be read; give \w+", error), error
            assert "Traceback" not in error


def test_help_shows_defaults_that_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("some.module", "What it does.\n\n    as written")
    parser.add_argument("--size", type=int, default=7)
    parser.add_argument("--name", default="x", help="of it")
    parser.add_argument("--count", type=int, default=0, help="nought is a number")
    parser.add_argument("--path", help="without")
    parser.add_argument("--flag", action="store_true", help="switch")
    parser.add_argument("--several", nargs="*", default=[], help="of them")
    parser.add_argument("--own", default=3, help="default: %(default)s, or not")
    parser.add_argument("--hidden", default=4, help=argparse.SUPPRESS)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert "\n    as written\n" in text
    lines = {words[0]: " ".join(words[1:]) for line in text.splitlines() if (words := line.split())}
    assert lines["--size"].endswith("default: 7")
    assert lines["--name"].endswith("of it (default: x)")
    assert lines["--count"].endswith("nought is a number (default: 0)")
    assert lines["--own"].endswith("default: 3, or not")
    assert not any("default" in lines[name] for name in ("--path", "--flag", "--several"))
    assert "hidden" not in text


def test_the_command_of_pip(capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
    assert entry[0] == "ringattn"
    module, function = entry[1].split(":")
    assert getattr(import_module(module), function) is commands.main
    for words, status in (([], 0), (["--help"], 0), (["nothing"], 2)):
        with pytest.raises(SystemExit) as end:
            commands.main(words)
        assert end.value.code == status
        said = "".join(capsys.readouterr())
        assert all(name in said for name in commands.COMMANDS)
    for name in commands.COMMANDS:
        with pytest.raises(SystemExit) as end:
            commands.main([name, "--help"])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: ringattn {name} ")
    words = ["plan", "--model", "llama-3.2-1b", "--context", "4k", "--gpus", "1"]
    assert commands.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert commands.main([*words, "--gpu-memory", "0"]) == 2
    assert capsys.readouterr().err.startswith("ringattn plan: --gpu-memory is 0")


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_table_has_columns_as_wide_as_their_widest_entry(left: int) -> None:
    lines = table(["name", "x", "long head"], [["a", "12345", "1", "a remark"], ["longer name", "2"]], left)
    assert [len(line) for line in lines[:2]] == [11 + 2 + 5 + 2 + 9, 11 + 2 + 5 + 2 + 9 + 2 + len("a remark")]
    for line, (name, x) in zip(lines, (("name", "x"), ("a", "12345"), ("longer name", "2")), strict=True):
        assert line[:11].strip() == name
        assert line[13:18] == (x.ljust(5) if left > 1 else x.rjust(5))[: len(line) - 13]
        assert line[0] == " " or left > 0 or len(name) == 11
    assert terminal.table(["only", "heads"], []) == ["only  heads"]


@pytest.mark.parametrize(
    ("error", "status", "says"), [(KeyboardInterrupt, 130, "\nstopped\n"), (BrokenPipeError, 141, "")]
)
def test_a_command_that_is_stopped_is_quiet(
    error: type[BaseException],
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal.os, "dup2", lambda *files: None)

    def stopped() -> int:
        raise error

    assert run(stopped) == status
    assert capsys.readouterr().err == says
    assert run(lambda: 3) == 3
