"""The ten lines of README on the ranks of torchrun, compared with one process: ./scripts/wheel starts it.

    torchrun --standalone --nproc-per-node 2 scripts/ten_lines.py README.md

The file must be run by its path, so that the installed ringattn is imported and not that of the repository.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

HEADS, HEAD_DIM, SEQ = 2, 8, 13


class Layer(nn.Module):
    """A layer in which each token's output depends on all that attention returned."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v: (batch, tokens, heads, head_dim)."""
        return self.project(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)

    def rest(self, x: Tensor, attention: Tensor) -> Tensor:
        """Return the layer's output, given that of attention."""
        return x + attention.flatten(2)


def main() -> None:
    """Run the code, and raise AssertionError if its result is not that of dense attention in one process."""
    (code,) = re.findall(r"```python\n(.*?)```", Path(sys.argv[1]).read_text(), re.S)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(31, (2, SEQ), device=device)
    token, position = (nn.Embedding(n, HEADS * HEAD_DIM, device=device) for n in (31, SEQ))
    layers = [Layer().to(device) for _ in range(2)]
    names = {"tokens": tokens, "layers": layers, "embed": lambda ids, at: token(ids) + position(at)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ten_lines.py").write_text(code)
        names = runpy.run_path(str(Path(folder) / "ten_lines.py"), names)

    x = token(tokens) + position.weight
    for layer in layers:
        q, k, v = (y.transpose(1, 2) for y in layer.qkv(x))
        x = layer.rest(x, nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))
    torch.testing.assert_close(names["whole"], x)

    import ringattn

    if dist.get_rank() == 0:
        print(f"ringattn {ringattn.__version__} in {Path(ringattn.__file__).parent}: the result of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
