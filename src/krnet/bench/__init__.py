"""What is measured: bytes against quality, speed, and what a recording would cost."""
