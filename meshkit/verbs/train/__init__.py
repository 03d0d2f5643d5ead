"""`meshkit train`: a training on attached devices, into a run folder."""
