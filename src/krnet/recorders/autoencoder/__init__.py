"""The paper's rival: a code for each sample, and KRNet's decoder."""
