"""What a language model is given, checked on every rank: tokens, labels, documents, layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..documents import Integers, as_ints, document_borders, in_words
from ..exchange import Group, place_in
from ..layout import SequenceLayout
from ..pattern import in_brief, shape_in_brief
from ..torch_op import agreed
from .rope import document_positions


class Positions(NamedTuple):
    """What agreed arguments of a model come to.

    Attributes:
        rotary: int64, shape (local_sequence,): of every local row, from the start of its document.
        documents: cumulative lengths, as ints; as they were given while torch.compile traces; None:
            one document.
        lengths: of each row of the batch; None: no padding.
    """

    rotary: Tensor
    documents: Integers | None
    lengths: list[int] | None


def agreed_positions(
    tokens: Tensor,
    documents: Integers | None,
    group: Group,
    layout: SequenceLayout | None,
    lengths: Integers | None = None,
    check: Callable[[], None] | None = None,
) -> Positions:
    """This rank's rotary positions, and the documents and lengths as ints.

    If any rank's tokens, documents or other arguments do not fit, an error on every rank: a rank
    that raised alone would leave the others waiting for it in the first attention.

    Args:
        tokens: the local shard, int64, shape (batch, local_sequence).
        documents: cumulative lengths of documents packed in the whole sequence.
        group: the ranks that share each sequence.
        layout: which positions each rank holds; None: contiguous equal shards.
        lengths: (batch,), the valid positions of each row of the batch, at least one.
        check: raises unless the other arguments of the call fit.
    """
    positions, borders, valid, failure = None, documents, None, None
    rank, world_size = place_in(group)
    try:
        positions = _positions(tokens, rank, world_size, layout)
        if check is not None:
            check()
        total = whole_length(tokens, world_size, layout)
        if lengths is not None:
            valid = checked_lengths(lengths, len(tokens), total)
        if isinstance(documents, Tensor) and torch.compiler.is_compiling():
            # Attention checks the numbers, which are not known here.
            positions = document_positions(positions, documents)
        elif documents is not None:
            borders = as_ints("documents", documents)
            # Where rows have lengths of their own, documents may end before the padding does.
            known = document_borders(borders, max(valid) if valid else None, total)
            positions = document_positions(positions, known)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    # What else must be equal on all ranks, the first attention compares.
    positions = agreed(positions, "LongNet", group, failure, device_of(tokens))
    return Positions(positions, borders, valid)


def checked_lengths(lengths: Integers, batch: int, total: int) -> list[int]:
    """The lengths of a prompt as ints.

    Args:
        lengths: valid positions of each row of the batch.
        batch: rows of the batch.
        total: positions of the whole prompt.

    Raises:
        TypeError, ValueError: they are not ints from 1 to `total`, one for each row.
    """
    valid = as_ints("lengths", lengths)
    if len(valid) != batch:
        raise ValueError(
            f"lengths must hold one number for each of {batch} rows; got {in_words(valid)}"
        )
    if not 1 <= min(valid) <= max(valid) <= total:
        wrong = next(n for n in valid if not 1 <= n <= total)
        raise ValueError(
            f"lengths must lie in [1, {total}], as every row needs a token to go on from; got "
            f"{wrong}"
        )
    return valid


def device_of(tokens: Tensor) -> torch.device:
    """Where tokens are, also where they are no tensor."""
    return tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")


def whole_length(tokens: Tensor, world_size: int, layout: SequenceLayout | None) -> int:
    """Positions of the whole sequence, of which `tokens` are the local shard."""
    return tokens.shape[1] * world_size if layout is None else layout.length


def check_tokens(tokens: Tensor, shape: str) -> None:
    """Raise unless tokens are int64 and have two dimensions, `shape` in words."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {in_brief(tokens)}")
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens must be int64; got {tokens.dtype}")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape {shape}; got {shape_in_brief(tokens)}")


def _positions(tokens: Tensor, rank: int, world_size: int, layout: SequenceLayout | None) -> Tensor:
    """The global position of every local row: int64, shape (local_sequence,)."""
    check_tokens(tokens, "(batch, local_sequence)")
    rows = tokens.shape[1]
    if layout is None:
        return torch.arange(rank * rows, (rank + 1) * rows, device=tokens.device)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None; got {in_brief(layout)}")
    held = f"got tokens of shape {tuple(tokens.shape)}"
    layout.check_shard(rank, world_size, rows, held)
    return layout.positions(rank, device=tokens.device)


def check_vocabulary(tokens: Tensor, embedding: nn.Module) -> None:
    """Raise a `ValueError` unless every token has an embedding; waits for the device.

    Args:
        tokens: int64, shape (batch, rows).
        embedding: of the model; only an `nn.Embedding` says how many tokens it has.
    """
    if not isinstance(embedding, nn.Embedding) or not tokens.numel():
        return
    least, most = (int(x) for x in tokens.aminmax())
    if least < 0 or most >= embedding.num_embeddings:
        raise ValueError(
            f"tokens must be from 0 to {embedding.num_embeddings - 1}, those of the model's "
            f"vocabulary; got {least if least < 0 else most}"
        )


def check_labels(labels: Tensor, tokens: Tensor) -> None:
    """Raise unless labels are int64 and have the shape of the tokens."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {in_brief(labels)}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64; got {labels.dtype}")
    if labels.shape != tokens.shape:
        raise ValueError(
            f"labels must have the shape of tokens, {tuple(tokens.shape)}; "
            f"got {shape_in_brief(labels)}"
        )
