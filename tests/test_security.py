"""What SECURITY.md says of the sources: no pickles, no object collectives, no unsafe loads, nothing that listens.

Names are resolved through imports: ``from torch import load as read`` makes ``read`` mean ``torch.load``. What is
forbidden may not be mentioned either, so that giving it another name hides nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ringattn", "kernels", "scripts", "benchmarks")
MODULES = {  # whole, but for their errors
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle", "marshal", "shelve", "pty",
    "socketserver", "http.server", "wsgiref", "xmlrpc.server", "multiprocessing.managers",
    "torch.distributed.rpc", "torch.package", "torch.hub", "torch.utils.cpp_extension",
}  # fmt: skip
FUNCTIONS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "posix.system", "subprocess.getoutput",
    "subprocess.getstatusoutput", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load",
    "pandas.read_pickle", "torch.serialization.load", "torch.jit.load", "multiprocessing.connection.Listener",
    "multiprocessing.Manager", "socket.create_server", "asyncio.start_server", "asyncio.start_unix_server",
    "asyncio.create_subprocess_shell", "logging.config.listen",
}  # fmt: skip
METHODS = {"listen", "create_server", "start_server", "read_pickle"}  # of whatever object
WRITES = "ringattn/program.py"  # and runs source, which tests/test_program.py looks at
CALLED = {"torch.load", "numpy.load"}  # may only be called, so that their arguments can be seen
SAFE = {  # the values that an argument may have
    "weights_only": "True", "allow_pickle": "False", "shell": "False", "trust_remote_code": "False",
}  # fmt: skip


def meanings(tree: ast.AST) -> dict[str, str]:
    """Return what the names that a source imports mean: {"np": "numpy", "load": "torch.load"}."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def forbidden(name: str) -> bool:
    """Say whether a resolved name is one of a module or a function that may not be used."""
    inside = any(name == module or name.startswith(f"{module}.") for module in MODULES)
    objects = "." in name and name.endswith(("_object", "_object_list")) and name != "ctypes.py_object"
    return not name.endswith("Error") and (inside or objects or name in FUNCTIONS)


def offences(source: str) -> Iterator[str]:
    """Yield the uses of what could run the contents of a message or of a file, or listen: "line 1: torch.load"."""
    tree = ast.parse(source)
    names = meanings(tree)

    def resolved(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{resolved(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and node.args and isinstance(last := node.args[-1], ast.Constant):
            function = resolved(node.func).removeprefix("builtins.")
            if function == "getattr" and len(node.args) == 2:
                return f"{resolved(node.args[0])}.{last.value}"
            if function == "importlib.import_module" and len(node.args) == 1:
                return str(last.value)
        return "()"

    def mentioned(node: ast.AST, called: bool = False) -> Iterator[str]:
        found: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.expr):
            found = [resolved(node)]
        for name in found:
            name = name.removeprefix("builtins.")
            escapes = name in CALLED and not called and not isinstance(node, ast.ImportFrom)
            if forbidden(name) or escapes or name.endswith(".*"):
                yield f"line {node.lineno}: {name}"  # type: ignore[attr-defined]
        given = []  # words with their values, of a call or of a dict that may become one
        if isinstance(node, ast.Call):
            name = resolved(node.func)
            given = [(k.arg, ast.unparse(k.value)) for k in node.keywords if k.arg is None or k.arg in SAFE]
            unsafe = name == "torch.load" and ("weights_only", "True") not in given
            unsafe |= name == "numpy.load" and (len(node.args) > 2 or (None in dict(given)))
            if unsafe or name.rpartition(".")[2] in METHODS:
                yield f"line {node.lineno}: {name}"
        elif isinstance(node, ast.Dict):
            given = [
                (k.value, ast.unparse(v))
                for k, v in zip(node.keys, node.values, strict=True)
                if isinstance(k, ast.Constant) and k.value in SAFE
            ]
        yield from (f"line {node.lineno}: {word}={value}" for word, value in given if SAFE.get(word, value) != value)
        if not isinstance(node, ast.Attribute) or "()" in found[0]:  # parts of a name are no names of their own
            for child in ast.iter_child_nodes(node):
                yield from mentioned(child, isinstance(node, ast.Call) and child is node.func)

    yield from mentioned(tree)


def test_no_file_runs_what_it_reads() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    found = [(str(path.relative_to(ROOT)), what) for path in paths for what in offences(path.read_text())]
    assert [f"{path}, {what}" for path, what in found if path != WRITES] == []
    assert sorted(what.split(": ")[1] for path, what in found if path == WRITES) == ["compile", "exec"]


def test_such_lines_are_found() -> None:
    lines = (
        "from pickle import loads", "import pickle as p\np.loads(data)", "import pickle\nload = pickle.load",
        "import pickle\npickle.Unpickler(f).load()", "import pickle\nuse(pickle)", "from shelve import open",
        "import marshal\nmarshal.loads(x)", "import dill\ndill.load(f)", "import torch\ntorch.load(path)",
        "from torch import load\nload(p)", "import torch as t\nt.load(p)", "torch.load(p, weights_only=flag)",
        "from torch import load as read\nread(path, weights_only=False)", "import torch\ntorch.hub.load(x, y)",
        "import numpy as np\nnp.load(path, allow_pickle=True)", "from numpy import load\nload(p, allow_pickle=x)",
        "exec(text)", "eval(text)", "run = eval", "import os\nos.system(x)", "import os\nos.popen(x)",
        "from os import popen", "import subprocess\nsubprocess.run(text, shell=True)",
        "from subprocess import run\nrun(text, shell=yes)", "import subprocess\nsubprocess.getoutput(x)",
        "import yaml\nyaml.load(text)", "import torch.distributed as dist\ndist.all_gather_object(x, y)",
        "from torch.distributed import broadcast_object_list", "import torch.distributed.rpc as rpc\nrpc.init_rpc(x)",
        "from torch import distributed\nsend = distributed.send_object_list", "server.listen()",
        "import asyncio\nasyncio.start_server(f, host)", "make().create_server(f)", "socket.create_server(x)",
        "import http.server\nhttp.server.HTTPServer(x, y)", "from multiprocessing.connection import Listener",
        "AutoModel.from_pretrained(name, trust_remote_code=True)", "import torch\nload = torch.load\nload(p)",
        "import functools, torch\nf = functools.partial(torch.load, p)", "from torch import *\nload(p)",
        "import torch\ngetattr(torch, 'load')(p)", "__import__('pickle').loads(x)", "import builtins\nbuiltins.exec(x)",
        "import importlib\nimportlib.import_module('pickle').loads(x)", "import numpy as np\nnp.load(p, None, True)",
        "import numpy as np\nnp.load(p, **options)", "import subprocess\nsubprocess.run(x, **{'shell': True})",
        "import torch\ntorch.jit.load(p)", "import torch.serialization as ts\nts.load(p)",
        "exec(compile(x, p, 'exec'))",
        "from torch.utils.cpp_extension import load_inline",
        "import asyncio\nasyncio.create_subprocess_shell(x)",
        "import multiprocessing\nmultiprocessing.Manager()", "import logging.config\nlogging.config.listen(1)",
    )  # fmt: skip
    assert [text for text in lines if not list(offences(text))] == []


def test_safe_lines_are_allowed() -> None:
    lines = (
        "import json, subprocess, torch", "import numpy as np", "import torch.distributed.checkpoint as dcp",
        "torch.load(path, weights_only=True)", "json.load(file)", "dcp.load(state)", "model.eval()",
        "import pickle", "try:\n    pass\nexcept pickle.UnpicklingError:\n    pass",
        "subprocess.run(command, shell=False)", "tl.load(pointer)", "gather(x, use_gather_object=True)",
        "torch.compile(f)", "re.compile(x)", "np.load(path)", "{'allow_pickle': False}", "getattr(x, 'load')",
    )  # fmt: skip
    assert list(offences("\n".join(lines))) == []
