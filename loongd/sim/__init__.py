"""Virtual time: the real scheduler driven by a cost model instead of workers.

`Simulation` runs a length trace, `summarise` judges it, `goodput` finds the rate that a system can
sustain. No GPU, no torch, no clock, no network.
"""
