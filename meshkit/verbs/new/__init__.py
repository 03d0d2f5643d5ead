"""`meshkit new`: write a commented experiment file."""
