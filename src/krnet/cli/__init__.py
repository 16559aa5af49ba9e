"""The command line: a file for each command, or for a few that belong together; app.py collects them."""
