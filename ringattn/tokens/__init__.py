"""Functions of whole rows over shards, and their operators: halo exchange, and exchange of heads."""

from .exchange import neighbours as neighbours
from .exchange import unshard as unshard
from .heads import run_by_heads as run_by_heads
from .shift import causal_convolution as causal_convolution
from .shift import check_offset as check_offset
