"""Assembles the packages into one training run."""
