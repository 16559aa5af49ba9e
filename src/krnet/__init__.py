"""Record feature maps in a network and replay them by sample ID."""
