"""`meshkit profile` and `mk.profile`: measure a captured run."""
