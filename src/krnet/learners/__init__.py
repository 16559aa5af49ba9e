"""Ways to learn task after task, one file each."""
