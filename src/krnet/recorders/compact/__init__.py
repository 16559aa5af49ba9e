"""The compact network (recorder krnet): a few bytes per sample, and a small network shared by all samples."""
