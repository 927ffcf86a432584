"""Pages, and the tutorial in docs/idea."""
