"""Hangs planted in gangs on CPU devices: found in time, and named rightly."""
