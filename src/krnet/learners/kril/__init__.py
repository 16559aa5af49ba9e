"""KRIL: class-incremental learning on replayed feature maps."""
