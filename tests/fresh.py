"""Programs in processes of their own, each forked from one that has imported torch, which takes seconds, and no more.

done = fresh.run("import ringattn; print(1)", CUDA_VISIBLE_DEVICES="")     # as subprocess.run returns it
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = """
import gc, json, os, sys
import torch
gc.freeze()  # what is here already is not looked through when a program ends
for line in sys.stdin:
    code, environment, files = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for number, file in enumerate(files, 1):
    os.dup2(os.open(file, os.O_WRONLY), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(environment)
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that the others are forked from; it ends with this one, which holds the other end of a pipe."""
    environment, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
    )


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in the repository's root, first on the path, with the environment of this process, changed by
    ``environment``. Return its status and what it wrote."""
    server, whole = _server(), {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    assert server.stdin
    assert server.stdout
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as error:
        server.stdin.write(json.dumps([code, whole, [out.name, error.name]]) + "\n")
        server.stdin.flush()
        try:
            status = int(server.stdout.readline())
        except BaseException:  # a test that takes too long
            server.kill()
            _server.cache_clear()
            raise
        return subprocess.CompletedProcess(code, status, out.read().decode(), error.read().decode())


def passes_without_interpreter(file: str) -> None:
    """Run the tests of a file in a process where Triton's interpreter is off: all pass but one, which is skipped."""
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = run(f"import pytest, sys; sys.exit(pytest.main({arguments!r}))", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b\d+ passed, 1 skipped", done.stdout), done.stdout[-4000:]
