"""Ways to store features, one file each; base.py has the contract and the registry."""
