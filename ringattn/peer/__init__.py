"""Copies between the GPUs of one host: shared memory, copy engines, flags that streams write and wait for."""
