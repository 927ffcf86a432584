"""torch's ``context_parallel`` and what stands on it: accelerate's ``cp_size``, and the Trainers with it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from ...factory import Plan
from ..in_place import BLOCKS, Block
from ..recomputation import Scope
from ..replacing import everywhere, inside
from ..sdpa import _ATTENTION

_log = logging.getLogger(__name__)
_OPTIONS = ("layout", "dataflow", "deterministic", "local_size")


@contextmanager
def door(**options: Any) -> Iterator[None]:
    """``layout``, ``dataflow``, ``deterministic`` and ``local_size``: as for :func:`ringattn.plan`. The layout is
    "zigzag", torch's own, unless it is given; in Trainers the one that fits a batch's documents.

    Torch's functions are replaced wherever they have been imported to. Attention and mean losses change inside of
    ``with context_parallel(...)`` only; models of transformers run there on the whole rows behind the buffers."""
    if odd := sorted(set(options) - set(_OPTIONS)):
        raise TypeError(f"install('context_parallel') got {', '.join(odd)}; its options are {', '.join(_OPTIONS)}")
    unshard, mean = inspect.unwrap(context_parallel_unshard), F.cross_entropy
    latest: dict[str, Plan] = {}  # by group: the order of tensors to unshard, also after the block
    sequences: Scope[Any] | None = None

    def block_of(
        mesh: Any, *, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> Iterator[None]:
        several, dims, kept = list(buffers or ()), list(buffer_seq_dims or ()), list(no_restore_buffers or ())
        if len(several) != len(dims) or any(not any(k is b for b in several) for k in kept):
            raise ValueError(
                f"context_parallel got {len(several)} buffers, {len(dims)} buffer_seq_dims and {len(kept)} "
                "no_restore_buffers; pass a dim for each buffer, and of the buffers those that are not to be restored"
            )
        block = Block(mesh, several, dims, options)
        latest[mesh.get_group().group_name] = block.plan
        with block.closing, block.split(several, kept), BLOCKS.active(block):
            yield

    def unsharded(mesh: Any, buffers: Any, seq_dims: Any, load_balancer: Any = None) -> Any:
        plan = latest.get(mesh.get_group().group_name)
        if plan is None or load_balancer is not None:
            return unshard(mesh, buffers, seq_dims, load_balancer)
        return [plan.unshard(b, dim) for b, dim in zip(buffers, seq_dims, strict=True)]

    def here() -> Block | None:  # but for attention and losses inside of a model of transformers
        inside = sequences is not None and sequences.current(covered=True) is not None
        return None if inside else BLOCKS.current(covered=True)

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        block = here()
        return _ATTENTION(*args, **kwargs) if block is None else block.attention(*args, **kwargs)

    def cross_entropy(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        block = here() if reduction == "mean" and size_average is None and reduce is None else None
        way = reduction if block is None else "sum"
        loss = mean(input, target, weight, size_average, ignore_index, reduce, way, label_smoothing)
        return loss if block is None else block.mean(loss, target, weight, ignore_index)

    with ExitStack() as stack:
        stack.enter_context(inside(experimental.context_parallel, block_of))
        stack.enter_context(inside(context_parallel_unshard, unsharded))
        stack.enter_context(everywhere(_ATTENTION, attention))
        stack.enter_context(everywhere(mean, cross_entropy))
        if find_spec("transformers") is not None:
            try:
                import_module("ringattn.hf")  # registers attention and masks with transformers
                from ..hf import active, trainer
            except ImportError as error:
                _log.warning("models of transformers get what torch's context_parallel gives them: %s", error)
            else:
                sequences = active.SEQUENCES
                stack.enter_context(trainer.installed(BLOCKS, options))
        yield
