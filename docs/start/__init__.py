"""Where to start: the idea, and plain PyTorch."""
