"""Numbers to few bits and back, and the searches for a budget."""
