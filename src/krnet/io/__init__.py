"""Files that survive a crash, and result rows."""
