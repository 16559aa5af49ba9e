"""Networks and their layers."""
