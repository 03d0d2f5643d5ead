"""`meshkit explain`: where every parameter and activation goes, and why."""
