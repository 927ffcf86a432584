"""flash-attn's functions over ranks: the public names of :mod:`ringattn.adapters.flash` and ``flash_kvcache``.

from ringattn.flash import flash_attn_func      # in the place of: from flash_attn import flash_attn_func
with ringattn.use(plan):
    loss = model(tokens)
"""

from .adapters.flash import flash_attn_func as flash_attn_func
from .adapters.flash import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from .adapters.flash import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from .adapters.flash import flash_attn_varlen_func as flash_attn_varlen_func
from .adapters.flash import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from .adapters.flash import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from .adapters.flash_kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
