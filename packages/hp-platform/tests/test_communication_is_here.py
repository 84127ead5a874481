"""Communication is called in few modules, so the ledger can be complete."""

import re
from pathlib import Path

import hp_platform

CALL = re.compile(
    r"\b(?:dist|distributed)\.(?:all_gather|all_reduce|all_to_all|barrier|broadcast|gather|"
    r"batch_isend_irecv|i?recv|i?send|reduce|reduce_scatter|scatter)\w*\("
)


def test_only_collectives_and_what_it_prepares_calls_with_call_torch_distributed():
    root = Path(hp_platform.__file__).parent
    callers = {path.name for path in root.rglob("*.py") if CALL.search(path.read_text())}
    # It moves nothing: PyTorch's simulation of many ranks in one, as a second opinion in tests.
    callers.remove("local_tensor.py")
    assert callers == {"collectives.py", "direct.py", "transfers.py", "uneven.py"}
