"""What the tests that start `hp-train` through torchrun share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@dataclass
class Launcher:
    """Starts torchrun agents whose output goes to files; none outlives the test."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def arguments(self, out: Path, *more: str) -> list[str]:
        """Options of a small, short run over text in a folder, so that it starts fast."""
        config, text = self.folder / "config.json", self.folder / "text"
        if not text.exists():
            config.write_text(json.dumps(TINY))
            text.mkdir()
            (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        return [
            *("--config", str(config), "--data", str(text), "--out", str(out)),
            *("--steps", "3", "--warmup", "1", "--batch-size", "4", "--seq-len", "16"),
            *("--eval-batches", "1", "--log-every", "1", "--ns-dtype", "fp32"),
            *more,
        ]

    def start(
        self,
        *options: str,
        ranks: int = 2,
        agent: tuple[str, ...] = ("--standalone",),
        prefix: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        module: str = "hp_integration.train",
    ) -> "Run":
        """One torchrun agent with `ranks` local ranks; returns at once."""
        log = self.folder / f"agent-{len(self.processes)}.log"
        command = [
            *prefix,
            *(sys.executable, "-m", "torch.distributed.run"),
            *agent,
            f"--nproc-per-node={ranks}",
            *("-m", module),
            *options,
        ]
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
            )
        self.processes.append(process)
        return Run(process, log)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass
class Run:
    """One torchrun agent."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Exit status; fails the test with the output when it takes longer than `timeout`."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s; output so far:\n{self.output}")

    def succeeded(self, timeout: float = 240) -> str:
        """The output of a run that has to end with status 0."""
        status = self.wait(timeout)
        assert status == 0, self.output
        return self.output


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def losses() -> Callable[[Path], list[float]]:
    """Reads the training losses that a run has written into its folder."""

    def read(out: Path) -> list[float]:
        return list(json.loads((out / "metrics.json").read_text())["losses"])

    return read
