"""Make the shipped tables of kernel rates from published measurements."""
