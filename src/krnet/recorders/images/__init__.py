"""Compressed images, replayed as features by the trunk that made the features."""
