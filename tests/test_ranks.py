"""scripts/ranks.py: ranks agree on the first failure, and exit without the interpreter's shutdown."""

from __future__ import annotations

import json

import fresh
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from scripts import ranks


def agreed(problems: list[str | None]) -> str | None:
    return ranks.agree(problems[dist.get_rank()])


@pytest.mark.parametrize("world_size", on_ranks(3))
def test_every_rank_gets_the_first_problem(pools, world_size: int) -> None:
    assert pools(world_size).run(agreed, [None] * world_size) == [None] * world_size
    assert pools(world_size).run(agreed, [None, "out of memory", "late"]) == ["rank 1: out of memory"] * world_size


def test_a_problem_is_one_line() -> None:
    assert ranks.one_line(ValueError("\nno\nand more")) == "ValueError: no"
    assert ranks.one_line(KeyboardInterrupt()) == "KeyboardInterrupt: no text"
    assert ranks.one_line("no kernel\nand more") == "no kernel"
    assert len(ranks.one_line("x" * 1000)) == 300


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(RANK=1, LOCAL_RANK=1, WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match=r"local rank 1 has no GPU.*CUDA_VISIBLE_DEVICES="):
        ranks.join("cuda")


@pytest.mark.parametrize("status", [0, 3])
def test_leave_flushes_and_skips_the_shutdown(status: int) -> None:
    code = f"""
import atexit
from scripts import ranks
atexit.register(print, "the interpreter's shutdown")
print("text", end="")
ranks.leave({status})
"""
    done = fresh.run(code)
    assert (done.returncode, done.stdout) == (status, "text"), done.stderr


def test_end_skips_the_shutdown_however_main_ends() -> None:
    """In children of one process, which imports torch once; exit handlers would run in each of them."""
    bodies = {
        "return 3": (3, ""),
        "raise ValueError('no such thing')": (1, "ValueError: no such thing"),
        "raise SystemExit('start it otherwise')": (1, "start it otherwise\n"),
        "raise SystemExit(2)": (2, ""),
        "raise SystemExit": (0, ""),
        "raise KeyboardInterrupt": (130, ""),
    }
    code = f"""
import atexit, json, os, tempfile
from scripts import ranks
def ended(body):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1), os.dup2(error.fileno(), 2)
            atexit.register(print, "the interpreter's shutdown")
            names = {{}}
            exec("def main():\\n    " + body, names)
            ranks.end(names["main"])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [status, *(os.pread(file.fileno(), 10_000, 0).decode() for file in (out, error))]
print(json.dumps([ended(body) for body in {list(bodies)}]))
"""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    for (body, (status, error)), (got, out, said) in zip(bodies.items(), json.loads(done.stdout), strict=True):
        assert (got, out) == (status, ""), (body, said)
        assert error in said
        assert ("Traceback" in said) == ("ValueError" in body)
