"""Dataflows: how shards meet. Each moves queries, or keys and values, between ranks and calls the same kernels."""
