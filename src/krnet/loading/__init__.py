"""Batches of a recording for training: their order, and what is made ahead of time."""
