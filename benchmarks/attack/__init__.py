"""Run seeded attacks on what meshkit reads, renders and saves, and report the outcome of each."""
