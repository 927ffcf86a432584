"""Masks: which keys each query sees, as intervals of keys. :mod:`ringattn.mask` has the public names."""
