"""Dataflows: how the shards of queries, keys and values meet. All of them call the same kernels.

Start with :mod:`.ring`; :mod:`.reduce` is its dual, :mod:`.gather` fetches all keys first. A new one is a class like
these (:mod:`.contract`) and a line here.
"""

from .contract import Dataflow
from .gather import Gather
from .reduce import Reduce
from .ring import Ring

DATAFLOWS: dict[str, Dataflow] = {"ring": Ring(), "gather": Gather(), "reduce": Reduce()}
