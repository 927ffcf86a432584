"""Masks: which keys each query sees. Functions make masks, ``&`` intersects them.

``print(mask.draw())`` shows one (queries down, keys to the right):

>>> n = 8
>>> def show(*masks):
...     for rows in zip(*(m.draw().splitlines() for m in masks)):
...         print("   ".join(rows))
>>> show(causal(n), causal(n) & window(n, 2, -1), causal(n) & packed([0, 3, 8], n))
# . . . . . . .   # . . . . . . .   # . . . . . . .
# # . . . . . .   # # . . . . . .   # # . . . . . .
# # # . . . . .   # # # . . . . .   # # # . . . . .
# # # # . . . .   . # # # . . . .   . . . # . . . .
# # # # # . . .   . . # # # . . .   . . . # # . . .
# # # # # # . .   . . . # # # . .   . . . # # # . .
# # # # # # # .   . . . . # # # .   . . . # # # # .
# # # # # # # #   . . . . . # # #   . . . # # # # #
>>> show(causal(n) & chunked(n, 3), blocks(n, 3), spans([(1, 3), (4, 7)], n))
# . . . . . . .   # # # . . . . .   # . . . . . . .
# # . . . . . .   # # # . . . . .   # # # . . . . .
# # # . . . . .   # # # . . . . .   # # # . . . . .
. . . # . . . .   # # # # # # . .   # # # # . . . .
. . . # # . . .   # # # # # # . .   # # # # # # # .
. . . # # # . .   # # # # # # . .   # # # # # # # .
. . . . . . # .   # # # # # # # #   # # # # # # # .
. . . . . . # #   # # # # # # # #   # # # # # # # #

A mask is an interval of keys for every query (:mod:`.masks.intervals`). :func:`pieces` makes one that has no function
here; pass any as ``ringattn.plan(seq_len, mask=...)``.
"""

from .masks.common import causal as causal
from .masks.common import documents as documents
from .masks.common import full as full
from .masks.common import nothing as nothing
from .masks.common import packed as packed
from .masks.common import pieces as pieces
from .masks.common import prefix as prefix
from .masks.common import rows as rows
from .masks.common import window as window
from .masks.intervals import Mask as Mask
from .masks.slices import from_slices as from_slices
from .masks.structured import block_diffusion as block_diffusion
from .masks.structured import blocks as blocks
from .masks.structured import chunked as chunked
from .masks.structured import from_intervals as from_intervals
from .masks.structured import sinks as sinks
from .masks.structured import spans as spans
from .masks.structured import spans_of as spans_of
from .masks.structured import tree as tree
