"""API-level distributed tensor: placement algebra, redistribution, two-mode plans, gradient equivalence."""
