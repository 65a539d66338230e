"""One elastic instance: a process that runs its part of every step its group is given."""
