"""The images themselves, compressed, and replayed through their trunk."""
