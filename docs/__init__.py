"""Pages, and the tutorial in docs/start/idea."""
