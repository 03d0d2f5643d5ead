"""What a damaged checkpoint does to a run: seeded damages of every file, and what was restored after each."""
