"""Layouts: which tokens each rank holds, and what that costs."""
