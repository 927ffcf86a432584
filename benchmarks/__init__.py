"""Measurements: speed beside other kernels and libraries, scaling, training, traces, loss curves."""
