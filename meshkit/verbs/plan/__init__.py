"""`meshkit plan` and `mk.plan`: a step on GPUs that are not there; variants planned in parallel."""
