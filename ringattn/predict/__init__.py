"""Predictions of the time and memory of attention, before it runs."""
