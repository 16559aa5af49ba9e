"""Fused CUDA kernels; nn/layers.py holds the plain versions and says when these are used."""
