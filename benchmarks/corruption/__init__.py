"""Restore from checkpoints with seeded damages to every file, and count what was restored."""
