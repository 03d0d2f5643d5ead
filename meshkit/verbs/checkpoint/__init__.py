"""Checkpoints: written, verified, restored, exported."""
