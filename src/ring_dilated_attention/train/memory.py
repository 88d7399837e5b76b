"""What a run needs of a machine's memory, refused before it starts where there is less."""

from __future__ import annotations

import torch

from ..checks import host_memory
from .config import TrainConfig

_STATE_BYTES = 16  # of a parameter: itself, its gradient and AdamW's two moments, in float32
_TOKEN_BYTES = 16  # of a position: input and label, in int64
_LOGIT_BYTES = 8  # of a token of the vocabulary at a position: log-softmax and gradient, in float32
_PROCESS_BYTES = 100 << 20  # of a rank before it has a tensor: Python, torch, one thread


def check_memory(config: TrainConfig, world_size: int, local_ranks: int) -> None:
    """Refuse a run that needs more memory than there is, by a count that is too low if anything.

    Counted are the parameters with all that training keeps of them, the tokens, the inputs of
    blocks that are kept for backward, the logits of a chunk of rows and, on CPUs, what a process
    takes before it has a tensor.

    Args:
        config: the options.
        world_size: number of ranks.
        local_ranks: number of ranks on this machine.

    Raises:
        ValueError: it needs more; the message says how much, and which options to change.
    """
    model = config.model
    group_size = config.group_size(world_size)
    kv_dim = model.embed_dim // model.num_heads * (model.num_kv_heads or model.num_heads)
    block = 2 * model.embed_dim * (model.embed_dim + kv_dim + model.ffn_dim)
    state = (model.num_layers * block + model.vocab_size * model.embed_dim) * _STATE_BYTES
    rows = -(-config.batch_size // (world_size // group_size))
    kept = -(-model.num_layers // config.activation_checkpoint_blocks)
    itemsize = 4 if config.dtype == "float32" else 2
    positions = rows * (config.seq_len // group_size)
    batch = positions * (_TOKEN_BYTES + kept * model.embed_dim * itemsize)
    # `LongNet.loss` has the logits of all its rows at once, or of a chunk of each sequence.
    at_once = min(positions, rows * config.chunk_rows) if config.chunk_rows else positions
    logits = at_once * model.vocab_size * _LOGIT_BYTES
    have, where, ranks, process = host_memory(), "this machine", local_ranks, _PROCESS_BYTES
    if config.device != "cpu" and torch.cuda.is_available():
        have, where = torch.cuda.get_device_properties(0).total_memory, "a GPU here"
        ranks, process = 1, 0
    need = ranks * (process + state + batch + logits)
    if have is None or need <= have:
        return
    most = max(process, state, batch, logits)
    if most == state:
        change = "--num-layers, --embed-dim or --ffn-dim"
    elif most == batch or (most == logits and config.chunk_rows is None):
        change = "--batch-size or --seq-len"
        if most == logits:
            change += ", or give --chunk-rows"
    elif most == logits:
        change = "--chunk-rows"
    else:
        change = "--ranks"
    of = "" if ranks == 1 else f" for {ranks} ranks"
    alone = f", {_size(ranks * process)} for Python and torch" if process else ""
    raise ValueError(
        f"this run needs at least {_size(need)}{of}: {_size(ranks * state)} for parameters and "
        f"AdamW, {_size(ranks * batch)} for its batch, {_size(ranks * logits)} for logits{alone}; "
        f"{where} has {_size(have)}: lower {change}"
    )


def check_text(size: int, local_ranks: int, description: str) -> None:
    """Refuse text that does not fit into the machine's memory, before it is read.

    Args:
        size: bytes of all files.
        local_ranks: number of ranks on this machine; each holds all text, and twice while it reads.
        description: of the text, for the message.

    Raises:
        ValueError: it does not fit.
    """
    need, have = 2 * size * local_ranks, host_memory()
    if have is not None and need > have:
        of = "" if local_ranks == 1 else f" on each of {local_ranks} ranks"
        raise ValueError(
            f"{description} has {_size(size)}, and reading it{of} takes {_size(need)}; this "
            f"machine has {_size(have)}: give less --data"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count < 1e15 else f"{count / 1e12:,.4g} TB"
