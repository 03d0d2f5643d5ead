"""`meshkit profile`, `mk.profile` and `mk.live`: measure a run from its trace."""
