"""The paper's baseline: a code for each sample, and KRNet's decoder."""
