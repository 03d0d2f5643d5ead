"""Seeded attacks on what meshkit reads, renders and saves, and what came of each."""
