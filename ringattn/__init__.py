"""Exact attention over a sequence split across ranks.

plan = ringattn.plan(seq_len, group, causal=True)
x    = plan.shard(tokens, dim=1)
out  = ringattn.attention(q, k, v, plan)
full = plan.unshard(out, dim=1)
"""

from . import batch as batch
from . import errors as errors
from . import exchange as _exchange  # noqa: F401  # registers its operators
from . import host_memory as host_memory
from . import loss as loss
from . import mask as mask
from .adapters.comparison import NotExact as NotExact
from .adapters.comparison import check as check
from .adapters.flash import use as use
from .adapters.sdpa import wrap as wrap
from .functional import attention as attention
from .generation import CacheFull as CacheFull
from .generation import KVCache as KVCache
from .generation import Step as Step
from .generation import decode as decode
from .packing import pack as pack
from .packing import pack_stream as pack_stream
from .partial import Partial as Partial
from .partial import merge as merge
from .planning import dataflows as dataflows
from .planning import plan as plan
from .plans import Plan as Plan

__version__ = "0.1.0"
__all__ = [
    "CacheFull", "KVCache", "NotExact", "Partial", "Plan", "Step", "attention", "batch", "check", "dataflows", "decode",
    "errors", "host_memory", "loss",
    "mask", "merge", "pack", "pack_stream", "plan", "use", "wrap",
]  # fmt: skip
