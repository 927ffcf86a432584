"""Batches and losses of sequences that are split over ranks, and training in less memory."""

from .by_heads import by_heads as by_heads
from .by_tokens import by_tokens as by_tokens
from .offload import HostMemory as HostMemory
from .recompute import Recompute as Recompute
from .recompute import recompute as recompute
