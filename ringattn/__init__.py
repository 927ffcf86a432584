"""Exact attention over a sequence split across ranks.

plan = ringattn.plan(seq_len, group, causal=True)
x    = plan.shard(tokens, dim=1)
out  = ringattn.attention(q, k, v, plan)
full = plan.unshard(out, dim=1)
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from . import errors as errors
from .factory import Plan as Plan
from .factory import dataflows as dataflows
from .factory import plan as plan
from .functional import attention as attention
from .partial import Partial as Partial
from .partial import merge as merge

if _TYPE_CHECKING:
    from . import batch as batch
    from . import host_memory as host_memory
    from . import loss as loss
    from . import mask as mask
    from .adapters.doors import install as install
    from .adapters.flash import use as use
    from .adapters.sdpa import wrap as wrap
    from .generation import CacheFull as CacheFull
    from .generation import KVCache as KVCache
    from .generation import Step as Step
    from .generation import decode as decode
    from .generation.comparable import same_bits as same_bits
    from .tokens.linear import gated_delta_rule as gated_delta_rule
    from .tokens.linear import kda as kda
    from .tokens.linear import lightning_attention as lightning_attention
    from .tokens.linear import ssd as ssd
    from .tools.check.comparison import NotExact as NotExact
    from .tools.check.comparison import check as check
    from .training.invariant import fixed_rows as fixed_rows
    from .training.packing import pack as pack
    from .training.packing import pack_stream as pack_stream

__version__ = "0.1.0"
_ON_DEMAND = {  # names that are imported when they are asked for: where they are
    name: module
    for module, names in {
        "adapters.doors": ["install"],
        "adapters.flash": ["use"],
        "adapters.sdpa": ["wrap"],
        "generation": ["CacheFull", "KVCache", "Step", "decode"],
        "generation.comparable": ["same_bits"],
        "tokens.linear": ["gated_delta_rule", "kda", "lightning_attention", "ssd"],
        "tools.check.comparison": ["NotExact", "check"],
        "training.invariant": ["fixed_rows"],
        "training.packing": ["pack", "pack_stream"],
    }.items()
    for name in names
}
_MODULES = ("adapters", "batch", "generation", "host_memory", "loss", "mask", "training", "virtual")
__all__ = ["Partial", "Plan", "attention", "dataflows", "errors", "merge", "plan"]
__all__ += ["batch", "host_memory", "loss", "mask", *_ON_DEMAND]


def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        return _import_module(f".{name}", __name__)
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    found = globals()[name] = getattr(_import_module(f".{_ON_DEMAND[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
