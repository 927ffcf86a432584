"""check(): compare a module over ranks with the same module in one process."""
