"""The global manager's decisions: pure, no clock, no I/O, no torch.

`Scheduler.handle(event) -> list[Action]` is the only door. Time arrives inside the events.
"""
