"""Quantise and entropy-code numbers, and search for the settings that meet a size or a quality."""
