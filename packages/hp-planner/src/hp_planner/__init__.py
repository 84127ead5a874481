"""Derives a sharding plan from a transformer's module graph: six pure passes, overrides, lint."""
