"""Attention in pieces, from one scalar to four processes: start with idea.md."""
