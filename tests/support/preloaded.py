"""What the process has imported that the ranks of `run_ranks` are forked from."""

import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from typing import Any

NEEDED = (
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "matplotlib.figure",
    "peft",
    "rich.progress",
    "typer",
    "ring_dilated_attention.bench",
    "ring_dilated_attention.cli",
    "ring_dilated_attention.integrations.transformers",
    "ring_dilated_attention.nn",
)
"""By some ranks. Each would take its seconds to import them, in each test."""


def preload_what_tests_have_imported() -> None:
    """Let that process import of `NEEDED` what this one has by the time it asks for ranks."""
    preload = ForkServerContext.set_forkserver_preload

    def preload_more(self: Any, modules: Sequence[str]) -> None:
        preload(self, [*modules, *(name for name in NEEDED if name in sys.modules)])

    vars_of: Any = ForkServerContext
    vars_of.set_forkserver_preload = preload_more
