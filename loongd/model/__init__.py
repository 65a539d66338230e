"""The model: its description, weights, forward pass and sampler."""
