"""Imports once, in the parent, what every forked rank would otherwise import for itself."""

import torch._dynamo  # noqa: F401
