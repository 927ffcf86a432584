"""Transport: the ranks of a group, what they exchange, and how a failure of one reaches the others."""
