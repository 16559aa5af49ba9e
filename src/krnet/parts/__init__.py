"""A recording in parts: a folder that holds a fitted model, coded samples in many files, and a manifest of them."""
