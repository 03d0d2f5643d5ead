"""`meshkit rehearse`: one GPU's part of a step, on one real GPU."""
