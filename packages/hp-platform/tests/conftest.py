"""Tests import their shared readers of torch_npu by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
