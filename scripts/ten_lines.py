"""The ten lines of README on the ranks of torchrun, compared with one process: ./scripts/wheel starts it.

    torchrun --standalone --nproc-per-node 2 scripts/ten_lines.py README.md

Run it by its path, so that the installed ringattn is imported and not that of the repository. It takes some 20 seconds.
"""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import ringattn
from ringattn.tools.terminal import Parser, existing


def code_of(readme: str) -> str:
    """Return the Python code of README."""
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    return code


def dense(names: dict[str, Any]) -> Tensor:
    """Return what ``whole`` must be, given all that the ten lines define: (batch, tokens, heads, head_dim)."""
    tokens = names["tokens"]
    x = names["embed"](tokens) + names["place"](torch.arange(tokens.shape[1], device=tokens.device))
    q, k, v = (y.transpose(1, 2) for y in names["project"](x).unflatten(2, (3, 8, 64)).unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def main() -> None:
    """Run the code, and raise AssertionError if its result is not that of dense attention in one process."""
    parser = Parser("torchrun --standalone --nproc-per-node 2 scripts/ten_lines.py", __doc__)
    readme = existing("the README of this version, which has the ten lines")
    parser.add_argument("readme", type=readme, nargs="?", default="README.md", help="the file that has the lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ten_lines.py"
        file.write_text(code_of(args.readme.read_text()))
        names = runpy.run_path(str(file))
    torch.testing.assert_close(names["whole"], dense(names))

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"ringattn {ringattn.__version__} in {Path(ringattn.__file__).parent}: the result of one process")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
