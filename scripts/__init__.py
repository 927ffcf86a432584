"""The commands that users run, each as python -m scripts.NAME from the root of the repository."""
