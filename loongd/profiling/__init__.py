"""Measuring the real workers: what to run, how to time it, what to keep of it."""
