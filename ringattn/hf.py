"""Hugging Face models over ranks: the public names of :mod:`ringattn.adapters.hf`."""

from .adapters.hf import NAME as NAME
from .adapters.hf import RingTrainerMixin as RingTrainerMixin
from .adapters.hf import Sequence as Sequence
from .adapters.hf import Visible as Visible
from .adapters.hf import check_hooks as check_hooks
from .adapters.hf import check_model as check_model
from .adapters.hf import prepare as prepare
from .adapters.hf import sequence as sequence
