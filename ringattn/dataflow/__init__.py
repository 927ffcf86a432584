"""Dataflows: how the shards of queries, keys and values meet. All of them call the same kernels.

Start with :mod:`.ring`; :mod:`.reduce` is its dual, :mod:`.gather` fetches all keys first. A new one is a class like
these (:mod:`.base`) and a line here. Deterministic plans run :mod:`.same_bits`, whichever they name.
"""

from .base import Dataflow
from .gather import Gather
from .reduce import Reduce
from .ring import Ring

DATAFLOWS: dict[str, Dataflow] = {"ring": Ring(), "gather": Gather(), "reduce": Reduce()}


def choose(name: str, deterministic: bool) -> Dataflow:
    """Return the dataflow of plans that name one of :data:`DATAFLOWS`."""
    if deterministic:
        from .same_bits import SAME_BITS

        return SAME_BITS
    return DATAFLOWS[name]
