"""Batches and losses of sequences that are split over ranks."""
