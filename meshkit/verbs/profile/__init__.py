"""`meshkit profile` and `mk.profile`: a captured run, measured."""
