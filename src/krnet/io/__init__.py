"""Files that survive a crash, and the ledger of results."""
