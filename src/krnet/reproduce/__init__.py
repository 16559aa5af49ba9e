"""Run the recipes of `recipes/` and set their results beside the paper's."""
