"""The registry of works; importing this package fills it."""
