"""What SECURITY.md says of the sources: no pickles, no object collectives, no unsafe loads, nothing that listens."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    p for folder in ("ringattn", "kernels", "scripts", "benchmarks") for p in sorted((ROOT / folder).rglob("*.py"))
]
FORBIDDEN = {
    "pickle.load", "pickle.loads", "marshal.loads", "shelve.open", "eval", "exec", "os.system", "socket.listen",
    "yaml.load", "torch.hub.load",
}  # fmt: skip


def offences(source: str) -> list[str]:
    """Return the calls in a source that could run what another process or a file contains."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        last = name.rpartition(".")[2]
        only_weights = keywords.get("weights_only")
        unsafe = (
            last == "load" and "torch" in name and not (isinstance(only_weights, ast.Constant) and only_weights.value)
        )
        through_shell = "shell" in keywords and ast.unparse(keywords["shell"]) != "False"
        remote = "trust_remote_code" in keywords
        objects = last.endswith(("_object", "_object_list"))
        listens = last in ("listen", "create_server")
        if name in FORBIDDEN or unsafe or through_shell or remote or objects or listens:
            calls.append(f"line {node.lineno}: {name}")
    return calls


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)", "dist.all_gather_object(x, y)", "torch.load(path)", "exec(text)", "server.listen()",
        "torch.load(path, weights_only=False)", "subprocess.run(text, shell=True)", "dist.broadcast_object_list(x)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_such_calls_are_found(line: str) -> None:
    assert offences(line) == [f"line 1: {line.partition('(')[0]}"]


def test_safe_calls_are_allowed() -> None:
    assert offences("torch.load(path, weights_only=True)\njson.load(file)\ndcp.load(state)\n") == []
