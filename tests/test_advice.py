"""What an error advises works: each wrong call of a table raises, and the call that its text advises runs.

The table has every error of the readers of rows (:data:`READERS`): those without a case fail the last test.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringattn
from ringattn import loss, virtual
from ringattn import mask as masks
from ringattn.flash import flash_attn_func, flash_attn_varlen_func

ROOT = Path(ringattn.__file__).parent
READERS = ("training/rows.py", "training/batch.py", "adapters/same_mask.py")
N = 8
IDS = torch.arange(N)[None]
TWO = torch.tensor([[0] * 3 + [1] * 5])
PADDED = torch.tensor([[0] * 6 + [-1] * 2])
RESTARTS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
ONES = torch.ones(1, N, dtype=torch.int64)


def documents(**more: Any) -> Tensor | None:
    return ringattn.batch.documents({"input_ids": IDS, **more})


def shard(plan: dict[str, Any] | None = None, seq_dims: Any = None, n: int = N, **more: Any) -> dict[str, Any]:
    batch = {name: x for name, x in {"input_ids": IDS, **more}.items() if x is not None}
    return ringattn.plan(n, causal=True, **(plan or {})).shard_batch(batch, seq_dims=seq_dims)


def read(**more: Any) -> dict[str, Any]:
    """The plan with documents=ringattn.batch.documents(batch)."""
    return shard(dict(documents=documents(**more)), **more)


def flash(plan: dict[str, Any], causal: bool = True, **how: Any) -> Tensor:
    q = torch.randn(1, N, 2, 8)
    with ringattn.use(ringattn.plan(N, **{"causal": True, **plan})):
        return flash_attn_func(q, q, q, causal=causal, **how)


def varlen(plan: dict[str, Any], bounds: Any, bounds_k: Any = None) -> Tensor:
    q, k = torch.as_tensor(bounds), torch.as_tensor(bounds if bounds_k is None else bounds_k)
    x = torch.randn(N, 2, 8)
    with ringattn.use(ringattn.plan(N, causal=True, **plan)):
        return flash_attn_varlen_func(x, x, x, q, k, N, N, causal=True)


class Calls(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, **self.how)


def wrapped(plan: dict[str, Any], **how: Any) -> Tensor:
    return ringattn.wrap(Calls(**how), ringattn.plan(N, **plan))(torch.randn(1, 2, N, 8))


def of_ranks(same: bool) -> None:
    def body(rank: virtual.VirtualRank) -> None:
        ringattn.plan(N, rank).shard_batch({"input_ids": IDS if same else IDS + rank.rank})

    virtual.run(2, body)


LENGTHS = [3, 5]
BOUNDS = [0, *itertools.accumulate(LENGTHS)]
LABELS = torch.tensor([3])
# Beginning of the error, the wrong call, and the calls that its text advises.
CASES: list[tuple[str, Callable[[], Any], list[Callable[[], Any]]]] = [
    ("the batch has 'labels'; it needs", lambda: shard(input_ids=None, labels=IDS), [lambda: shard(labels=IDS)]),
    (
        "the batch is of type list; pass a dict",
        lambda: ringattn.batch.documents([IDS]),  # type: ignore[arg-type]
        [lambda: ringattn.batch.documents({"input_ids": IDS})],
    ),
    (
        "input_ids is of type ndarray; pass a tensor: torch.as_tensor",
        lambda: shard(input_ids=IDS.numpy()),
        [lambda: shard(input_ids=torch.as_tensor(IDS.numpy()))],
    ),
    ("input_ids has shape (8,); it must be (batch", lambda: shard(input_ids=IDS[0]), [lambda: shard(input_ids=IDS)]),
    (
        "labels has dtype torch.float32; pass integers, -100 for",
        lambda: shard(labels=IDS.float()),
        [lambda: shard(labels=IDS), lambda: shard(scores=IDS.float())],
    ),
    (
        "labels has shape (1,); it must be (1, 8), one for each",
        lambda: shard(labels=LABELS),
        [lambda: shard(labels=IDS), lambda: shard(labels=LABELS, seq_dims={"labels": None})],
    ),
    (
        "targets has dtype torch.float32; pass integers",
        lambda: loss.log_probs(torch.randn(1, N, 9), IDS.float()),
        [lambda: loss.log_probs(torch.randn(1, N, 9), IDS)],
    ),
    (
        "attention_mask is (1, 1, 8, 8); only",
        lambda: shard(attention_mask=torch.ones(1, 1, N, N)),
        [lambda: shard(dict(window_size=(2, 0), documents=PADDED), attention_mask=(PADDED >= 0).long())],
    ),
    (
        "attention_mask has the value 2; it must be 0 (padding) or 1. In its place",
        lambda: read(attention_mask=TWO + 1),
        [lambda: read(documents=TWO)],
    ),
    (
        "documents says that token 3 of row 0 begins a document",
        lambda: read(documents=TWO, cu_seqlens=[0, N]),
        [lambda: read(documents=TWO), lambda: read(cu_seqlens=[0, N])],
    ),
    (
        "documents says that token 6 of row 0 is padding",
        lambda: read(documents=PADDED, attention_mask=ONES),
        [lambda: read(documents=PADDED), lambda: read(attention_mask=ONES)],
    ),
    (
        "documents has shape (2, 8); it must be (1, 8)",
        lambda: read(documents=TWO.repeat(2, 1)),
        [lambda: read(documents=TWO)],
    ),
    (
        "attention_mask of row 0 has zeros between ones",
        lambda: read(attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])),
        [
            lambda: read(attention_mask=torch.tensor([[1] * 7 + [0]])),
            lambda: read(documents=torch.tensor([[0, 0, -1, 1, 1, 1, 1, 1]])),
        ],
    ),
    (
        "position_ids has shape (8, 1); it must be",
        lambda: shard(position_ids=IDS.T),
        [lambda: shard(position_ids=IDS), lambda: shard(position_ids=IDS.T, seq_dims={"position_ids": 0})],
    ),
    (
        "position_ids of row 0 go from 2 to 0, but there is also an attention_mask",
        lambda: read(position_ids=RESTARTS, attention_mask=ONES),
        [
            lambda: read(position_ids=RESTARTS),
            lambda: read(position_ids=RESTARTS, attention_mask=ONES, documents=TWO),
            lambda: read(position_ids=RESTARTS, attention_mask=ONES, documents=TWO * 0),
        ],
    ),
    (
        "position_ids of row 0 go from 2 to 0 at token 3",
        lambda: shard(position_ids=RESTARTS),
        [
            lambda: read(position_ids=RESTARTS),
            lambda: shard(dict(cu_seqlens=BOUNDS), position_ids=RESTARTS),
            lambda: shard(position_ids=RESTARTS, documents=TWO * 0),
        ],
    ),
    (
        "image has shape (5, 3), which is not",
        lambda: shard(image=torch.zeros(5, 3)),
        [
            lambda: shard(image=torch.zeros(5, 3), seq_dims={"image": None}),
            lambda: shard(image=torch.zeros(5, N), seq_dims={"image": 1}),
        ],
    ),
    ("the batch has 8 tokens a row, but the plan", lambda: shard(n=9), [lambda: shard(n=8)]),
    (
        "attention_mask says that token 6 of row 0 is padding",
        lambda: shard(attention_mask=(PADDED >= 0).long()),
        [lambda: read(attention_mask=(PADDED >= 0).long())],
    ),
    (
        "attention_mask says that token 6 of row 0 is a token",
        lambda: shard(dict(documents=PADDED), attention_mask=ONES),
        [lambda: read(attention_mask=ONES)],
    ),
    (
        "the batch says that the document of token 3",
        lambda: shard(cu_seqlens=BOUNDS),
        [lambda: read(cu_seqlens=BOUNDS)],
    ),
    (
        "the plan's documents have 2 rows, but the batch has 1",
        lambda: shard(dict(documents=TWO.repeat(2, 1))),
        [lambda: shard(dict(documents=TWO))],
    ),
    ("seq_dims names 'images', but", lambda: shard(seq_dims={"images": 1}), [lambda: shard(seq_dims={})]),
    ("shard_batch() differs across ranks", lambda: of_ranks(False), [lambda: of_ranks(True)]),
    # Those of masks, by every name
    (
        "cu_seqlens starts with 3; it must start with 0",
        lambda: read(cu_seqlens=LENGTHS),
        [lambda: read(cu_seqlens=BOUNDS)],
    ),
    ("cu_seqlens has shape (1, 3)", lambda: read(cu_seqlens=[BOUNDS]), [lambda: read(cu_seqlens=[BOUNDS][0])]),
    (
        "cu_seqlens ends with 3; it must end with seq_len = 8; if the rest is padding, append 8",
        lambda: ringattn.plan(N, cu_seqlens=[0, 3]),
        [lambda: ringattn.plan(N, cu_seqlens=[0, 3, 8])],
    ),
    (
        "documents[0] has the id 0 in 2 separate runs",
        lambda: ringattn.plan(N, documents=[[0] * 3 + [1] * 3 + [0] * 2]),
        [lambda: ringattn.plan(N, documents=[[0] * 3 + [1] * 3 + [2] * 2])],
    ),
    ("documents has dtype torch.float32", lambda: read(documents=TWO.float()), [lambda: read(documents=TWO)]),
    (
        "packed documents need seq_len_k == seq_len",
        lambda: ringattn.plan(N, seq_len_k=9, cu_seqlens=BOUNDS),
        [
            lambda: ringattn.plan(N, cu_seqlens=BOUNDS),
            lambda: ringattn.plan(N, seq_len_k=9, cu_seqlens=BOUNDS, cu_seqlens_k=[0, 4, 9]),
        ],
    ),
    (
        "cu_seqlens has 2 documents and cu_seqlens_k 1",
        lambda: masks.packed(BOUNDS, N, [0, 9]),
        [lambda: masks.packed(BOUNDS, N, [0, 9, 9])],
    ),
    # Calls that are compared with the plan
    ("flash_attn_func got dropout_p=0.1", lambda: flash({}, dropout_p=0.1), [lambda: flash({}, dropout_p=0.0)]),
    ("flash_attn_func got causal=False, but", lambda: flash({}, False), [lambda: flash(dict(causal=False), False)]),
    (
        "flash_attn_func got window_size=(2, 0), but",
        lambda: flash({}, window_size=(2, 0)),
        [lambda: flash(dict(window_size=(2, 0)), window_size=(2, 0))],
    ),
    (
        "flash_attn_func got deterministic=True",
        lambda: flash({}, deterministic=True),
        [lambda: flash(dict(deterministic=True), deterministic=True)],
    ),
    (
        "the plan has padding, which flash_attn_varlen_func",
        lambda: varlen(dict(documents=PADDED), [0, N]),
        [lambda: varlen(dict(cu_seqlens=[0, 6, 8]), [0, 6, 8]), lambda: flash(dict(documents=PADDED))],
    ),
    (
        "flash_attn_varlen_func got cu_seqlens_q of 2 documents and cu_seqlens_k of 1",
        lambda: varlen({}, BOUNDS, [0, N]),
        [lambda: varlen(dict(cu_seqlens=BOUNDS, cu_seqlens_k=[0, N, N]), BOUNDS, [0, N, N])],
    ),
    (
        "flash_attn_varlen_func got cu_seqlens_q of 2 documents, but the plan",
        lambda: varlen({}, BOUNDS),
        [lambda: varlen(dict(cu_seqlens=BOUNDS), BOUNDS)],
    ),
    (
        "flash_attn_varlen_func got cu_seqlens_k of 2 documents, but the plan",
        lambda: varlen(dict(cu_seqlens=BOUNDS), BOUNDS, [0, 4, N]),
        [lambda: varlen(dict(cu_seqlens=BOUNDS, cu_seqlens_k=[0, 4, N]), BOUNDS, [0, 4, N])],
    ),
    (
        "flash_attn_varlen_func got cu_seqlens_q from 0 to 4, but the plan's whole sequence",
        lambda: varlen({}, [0, 4]),
        [lambda: varlen({}, [0, N])],
    ),
    (
        "scaled_dot_product_attention got is_causal=False, but the plan is causal",
        lambda: wrapped(dict(causal=True)),
        [lambda: wrapped({})],
    ),
    (
        "scaled_dot_product_attention got attn_mask of shape",
        lambda: wrapped({}, attn_mask=torch.ones(N, N) > 0),
        [lambda: wrapped(dict(window_size=(1, 1), documents=TWO))],
    ),
]


def raised(wrong: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        wrong()
    return str(caught.value)


@pytest.mark.parametrize(("text", "wrong", "advised"), CASES, ids=[case[0][:40] for case in CASES])
def test_what_the_error_advises_works(text: str, wrong: Callable[[], Any], advised: list[Callable[[], Any]]) -> None:
    assert raised(wrong).startswith(text)
    for call in advised:
        call()


def patterns(path: Path) -> list[str]:
    """The texts of all errors of a file, as regular expressions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            literal = [re.escape(str(x.value)) if isinstance(x, ast.Constant) else ".*" for x in parts]
            if any(isinstance(x, ast.Constant) for x in parts):
                found.append("".join(literal))
    return found


def test_no_error_is_without_a_case() -> None:
    texts = [raised(wrong) for _, wrong, _ in CASES]
    for file in READERS:
        several = patterns(ROOT / file)
        assert several
        assert [p for p in several if not any(re.fullmatch(p, text, re.DOTALL) for text in texts)] == []
