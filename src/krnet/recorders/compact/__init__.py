"""The compact network that a budget makes: a few bytes a sample, axes, and a network that repairs maps."""
