"""What every package's tests share."""

# torch.optim imports torch._dynamo when the first optimizer is made. Ranks are forked: imported
# here once, it costs them nothing; otherwise each rank of each group spends seconds on it.
import torch._dynamo  # noqa: F401
