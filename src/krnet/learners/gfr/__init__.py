"""Generative feature replay."""
