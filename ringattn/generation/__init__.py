"""Generation with keys and values sharded over ranks, in pages.

Start with :mod:`.cache` and :mod:`.decoding`; :mod:`.slots` is the block allocator, :mod:`.storage` holds this rank's
pages, and :mod:`.step` the tables of one step.
"""

from .cache import KVCache as KVCache
from .decoding import decode as decode
from .pages import CacheFull as CacheFull
from .step import Step as Step
