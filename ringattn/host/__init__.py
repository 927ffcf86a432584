"""Attention over tokens that lie in host memory."""
