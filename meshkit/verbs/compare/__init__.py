"""`meshkit compare`: two reports side by side."""
