"""Ranks of `run_ranks` with the environment that torchrun would give them."""

import importlib.util
import os
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def as_by_torchrun(rank: int, world_size: int) -> None:
    """Set what torchrun would; the process group is there already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
