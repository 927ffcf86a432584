"""Layouts: which tokens each rank holds, and what follows from that: blocks, needs, loads, schedules."""
