"""Exact attention over a sequence split across ranks.

plan = ringattn.plan(seq_len, group, causal=True)
x    = plan.shard(tokens, dim=1)
out  = ringattn.attention(q, k, v, plan)
full = plan.unshard(out, dim=1)
"""

from . import batch as batch
from . import loss as loss
from .attention import attention as attention
from .decode import KVCache as KVCache
from .decode import decode as decode
from .partial import Partial as Partial
from .partial import merge as merge
from .plan import Plan as Plan
from .plan import dataflows as dataflows
from .plan import plan as plan
from .wrap import wrap as wrap

__version__ = "0.1.0"
__all__ = ["KVCache", "Partial", "Plan", "attention", "batch", "dataflows", "decode", "loss", "merge", "plan", "wrap"]
