"""Measurements: speed compared with other kernels and libraries, scaling, training, traces, loss curves."""
