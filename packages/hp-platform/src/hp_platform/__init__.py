"""Collectives, ledger, topology and device access: the only caller of torch.distributed's communication."""
