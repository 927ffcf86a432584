"""The repository for the Kernels Hub, and the functions of one GPU that it has, against attention by its definition."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels.standalone import flash_attn_func, flash_attn_varlen_func
from scripts import kernels_hub


def definition(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention of (tokens, heads, head_dim) and lse, with a mask that is aligned at the ends."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    hidden = (ahead > right) * (right >= 0) | (-ahead > left) * (left >= 0)
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if slopes is not None:
        s = s - slopes[:, None, None] * ahead.abs()
    s = s.masked_fill(hidden, float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(hidden, 0.0)
    return torch.einsum("hqk,khd->qhd", p, v), lse


LENGTHS = {"one": ([37], [37]), "several": ([5, 20, 12], [5, 20, 12]), "longer keys": ([3, 8], [9, 30])}


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (6, 0)), (False, (4, 3))])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_outputs_and_gradients_are_those_of_the_definition(
    lengths: str, causal: bool, window: tuple[int, int], slopes: bool
) -> None:
    of_q, of_k = LENGTHS[lengths]
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(of_q), 4, 8), (sum(of_k), 2, 8), (sum(of_k), 2, 5)
    q, k, v = (torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes)
    options = dict(causal=causal, window_size=window, return_attn_probs=True)
    per_head = torch.tensor([0.5, 0.25, 0.1, 0.0]) if slopes else None
    if lengths == "one":
        out, lse, _ = flash_attn_func(q[None], k[None], v[None], alibi_slopes=per_head, **options)
        out, lse = out[0], lse[0]
    else:
        ends = [torch.tensor([0, *x]).cumsum(0) for x in (of_q, of_k)]
        out, lse, _ = flash_attn_varlen_func(q, k, v, *ends, max(of_q), max(of_k), alibi_slopes=per_head, **options)
    documents = zip(*(x.split(n) for x, n in ((q, of_q), (k, of_k), (v, of_k))), strict=True)
    right = 0 if causal else window[1]
    parts = [definition(*x, window[0], right, None if per_head is None else per_head.double()) for x in documents]
    want, want_lse = torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts], 1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (want, want_lse)]

    def gradients(out: Tensor, lse: Tensor) -> Any:
        return torch.autograd.grad((out * weights[0]).sum() + (lse * weights[1]).sum(), (q, k, v))

    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(out, lse), gradients(want, want_lse), rtol=1e-10, atol=1e-10)


def test_what_it_cannot_do_is_refused_by_name() -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1"):
        flash_attn_func(x, x, x, dropout_p=0.1)
    with pytest.raises(ValueError, match="heads of q a multiple"):
        flash_attn_func(x[:, :, :1], x, x)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is \[0, 3\]; it must rise from 0 to 4"):
        flash_attn_varlen_func(*[x[0]] * 3, torch.tensor([0, 4]), torch.tensor([0, 3]), 4, 4)
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn_varlen_func(*[x[0]] * 3, torch.tensor([0, 4]), torch.tensor([0, 4]), 4, 4, block_table=x)


LOADED = """
import importlib.util, pathlib, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numpy", "ringattn", "transformers"):
            raise ImportError(f"{name} is refused")

import torch  # which loads NumPy where it is
sys.meta_path.insert(0, Refuses())
for name in [x for x in sys.modules if x.split(".")[0] == "numpy"]:
    del sys.modules[name]
folder = pathlib.Path(sys.argv[1]) / "build/torch-cpu"
spec = importlib.util.spec_from_file_location("_of_a_hub", folder / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules["_of_a_hub"] = module
spec.loader.exec_module(module)
import importlib
for path in sorted(folder.rglob("*.py")):
    name = ".".join(["_of_a_hub", *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
    importlib.import_module(name)
q, k, v = (torch.randn(2, 37, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
out = module.flash_attn_func(q, k, v, causal=True)
want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
assert (out - want.transpose(1, 2)).abs().max() < 1e-10
out.sum().backward()
assert not {"numpy", "ringattn"} & {x.split(".")[0] for x in sys.modules}
print("exact")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    kernels_hub.write(folder, "somebody/some-kernels", 1)
    return folder


def test_the_package_loads_from_its_folder_without_numpy_and_ringattn(hub: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADED, str(hub)]
    compiled = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}  # the interpreter has NumPy
    done = subprocess.run(command, cwd=tmp_path, env=compiled, capture_output=True, text=True, timeout=200)
    assert done.stdout == "exact\n", done.stderr[-3000:]


def test_kernels_loads_it(hub: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="pip install kernels")
    module = kernels.get_local_kernel(hub, backend="cpu")
    assert module.__name__.startswith("_some_kernels_cpu_")
    q = torch.randn(1, 9, 2, 8)
    want = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
    torch.testing.assert_close(module.flash_attn_func(q, q, q), want)
    import kernels_data

    read = kernels_data.Metadata.read_from_file(hub / "build/torch-cuda/metadata.json")
    assert (read.name.python_name, read.version) == ("some_kernels", 1)


def test_other_sources_have_another_id(hub: Path) -> None:
    """So that two versions may be loaded at once."""
    ids = {kernels_hub.metadata("some-kernels", 1, "cpu", {"a.py": data})["id"] for data in (b"1", b"2")}
    assert len(ids) == 2
    for variant in (hub / "build").iterdir():
        digest = json.loads((variant / "metadata.json").read_text())["digest"]
        files = {path.relative_to(variant).as_posix(): path for path in variant.rglob("*.py")}
        assert digest["files"].keys() == files.keys()
        for name, path in files.items():
            assert base64.b64decode(digest["files"][name]) == hashlib.sha256(path.read_bytes()).digest()


def test_a_folder_that_is_not_empty_is_refused(hub: Path) -> None:
    with pytest.raises(FileExistsError, match="not empty"):
        kernels_hub.write(hub, "somebody/some-kernels", 1)
