"""`meshkit new`: a commented experiment file."""
