"""Muon for sharded training that needs nothing but the parameters' layouts."""
