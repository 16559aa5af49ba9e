"""Learning on replayed feature maps."""
