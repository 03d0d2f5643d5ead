"""Layer 8, the parts of `meshkit bench`: collectives, how they are timed and checked, rates, fit, report, views."""
