"""Measurements: file size against quality (rate), speed (speed), and the size of a recording in advance (plan)."""
