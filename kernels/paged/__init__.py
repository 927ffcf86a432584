"""Attention of a few new tokens to keys and values in pages: decoding."""
