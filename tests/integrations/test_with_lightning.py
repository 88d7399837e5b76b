"""Lightning: its own sampler, and FSDP2 by its ModelParallelStrategy.

That `examples/lightning_module.py` agrees with one process is tested with the other examples.
"""

from typing import Any

import pytest
from support.bounds import SUMMED_IN_FLOAT32
from support.launched import as_by_torchrun, example
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from ring_dilated_attention.checks import run_ranks

pytest.importorskip("lightning", reason="lightning is not installed")


def trainer(**options):
    import lightning

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(accelerator="cpu", devices=2, max_epochs=1, **quiet, **options)


def with_its_own_sampler(recipe):
    """Which splits data over both ranks of a group."""
    from lightning.pytorch.strategies import DDPStrategy

    base: Any = recipe.Module

    class Module(base):
        def train_dataloader(self):
            return DataLoader(self.data, batch_size=2)

    module = Module(recipe.texts(8, 50), 2)
    with pytest.raises(ValueError, match=r"check_same_batch .*num_replicas=data-parallel"):
        trainer(strategy=DDPStrategy(process_group_backend="gloo")).fit(module)


def under_fsdp(recipe):
    """FSDP2 over the ranks of a sequence: the largest error of a weight."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    base: Any = recipe.Recording

    class Module(base):
        def configure_model(self):
            over = self.device_mesh["data_parallel"]
            for block in self.model.blocks:
                fully_shard(block, mesh=over)
            fully_shard(self.model, mesh=over)

    module = Module(recipe.texts(8, 50), 2)
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer(strategy=strategy, use_distributed_sampler=False).fit(module)
    alone = recipe.train_alone([[batch] for batch in module.seen])
    pairs = zip(module.model.parameters(), alone.parameters(), strict=True)
    return max(((a.full_tensor() - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in pairs)


def on_ranks(rank, world_size):
    as_by_torchrun(rank, world_size)
    recipe = example("lightning_module")
    with_its_own_sampler(recipe)
    return under_fsdp(recipe)


@pytest.mark.slow
def test_its_sampler_is_refused_and_fsdp_works():
    """Lightning with its default sampler, and without it under ModelParallelStrategy."""
    for error in run_ranks(on_ranks, 2):
        assert error < SUMMED_IN_FLOAT32
