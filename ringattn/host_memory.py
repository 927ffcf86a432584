"""Attention over tokens in host memory: the public names of :mod:`ringattn.host.attention`."""

from .host.attention import attention as attention
from .host.attention import copy_ as copy_
from .host.attention import empty as empty
from .host.attention import empty_cache as empty_cache
