"""Hugging Face models over ranks: the public names of :mod:`ringattn.adapters.hf`."""

from .adapters.hf import older as _older  # noqa: F401  # puts its classes into the models' tables
from .adapters.hf.branches import tree_log_probs as tree_log_probs
from .adapters.hf.checks import NAME as NAME
from .adapters.hf.checks import check_model as check_model
from .adapters.hf.interface import attend as attend
from .adapters.hf.interface import visible_to_layers as visible_to_layers
from .adapters.hf.less_memory import reduce_memory as reduce_memory
from .adapters.hf.sequence import Sequence as Sequence
from .adapters.hf.sequence import Visible as Visible
from .adapters.hf.sequence import sequence as sequence
from .adapters.hf.sharded_cache import Generation as Generation
from .adapters.hf.sharded_cache import generation as generation
from .adapters.hf.trainer import RingTrainerMixin as RingTrainerMixin
from .adapters.hf.trainer import check_hooks as check_hooks
from .adapters.hf.trainer import prepare as prepare
from .training.recompute import Recompute as Recompute
