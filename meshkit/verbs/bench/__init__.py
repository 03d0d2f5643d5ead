"""`meshkit bench`: collectives and rates of the devices present."""
