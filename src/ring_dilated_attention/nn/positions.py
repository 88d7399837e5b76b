"""Positions of tokens: agreed on by all ranks, and their rotation.

The rotary embedding is that of RoFormer (Su et al. 2021, arXiv 2104.09864), by global positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..documents import Integers, as_ints, document_borders, in_words, ints_or_tensor
from ..exchange import Group, place_in
from ..layout import SequenceLayout
from ..options import check_options
from ..parallel import is_dtensor, of_own_part
from ..pattern import check_positive_float, check_positive_int, in_brief, shape_in_brief
from ..torch_op import agreed, rotate
from .modules import takes_kernels


def document_positions(positions: Tensor, documents: Integers) -> Tensor:
    """Positions that restart at every document, for a rotation (or labels) of packed documents.

    Args:
        positions: global positions, int64, of any shape; `SequenceLayout.positions` gives a rank's.
        documents: cumulative lengths ``[0, ..., n]``, as for `dilated_attention`; positions behind
            the last are counted from it.

    Returns:
        How far each position lies behind the start of its document; the shape and dtype of
        `positions`.

    Raises:
        TypeError: `documents` are not ints.
        ValueError: `documents` do not start with 0.

    Examples:
        >>> document_positions(torch.arange(6), [0, 2, 6]).tolist()
        [0, 1, 0, 1, 2, 3]
    """
    borders, starts = ints_or_tensor("documents", documents)
    if borders and borders[0] != 0:
        raise ValueError(f"documents must rise from 0; got {in_words(borders)}")
    source = torch.tensor(borders) if starts is None else starts
    starts = source.to(positions.device)
    document = torch.searchsorted(starts, positions.contiguous(), right=True) - 1
    return positions - starts[document]


class Rotation(NamedTuple):
    """The rotation of every local row; call it on a query or a key.

    On CUDA devices it is one Triton kernel, but for float64, and tables that have a gradient. The
    tables are as wide as a head: elsewhere a rotation is then three operations.

    Attributes:
        cos: float32, shape (local_sequence, head_dim), or (batch, local_sequence, head_dim) where
            rows of a batch stand at different positions; that batch may be 1. Every cosine twice,
            ``[c, c]``.
        sin: float32, the shape of `cos`: ``[-s, s]``.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the pairs (x[i], x[i + head_dim // 2]) of every row by its position's angles.

        Args:
            x: floating point, shape (batch, local_sequence, heads, head_dim); or a DTensor of which
                that is this rank's part.

        Returns:
            The rotated tensor, with the shape and dtype of `x`; the rotation is done in float32
            (float64 for float64 inputs).

        Raises:
            ValueError: the batch, the rows or the head_dim of `x` are not those of this rotation.
        """
        if is_dtensor(x):
            return of_own_part(self.__call__, x)
        self._check(x)
        if self._fits_one_kernel(x):
            return rotate(x, x.detach()[:, :, :0], *self)[0]
        cos, sin = self.cos.unsqueeze(-2), self.sin.unsqueeze(-2)
        # Computed in float32 at least, as torch promotes; a cast would be one more operation.
        rotated = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
        return rotated.to(x.dtype)

    def _fits_one_kernel(self, x: Tensor) -> bool:
        """Whether `rotate` computes it, which makes no gradients of the tables."""
        return (
            takes_kernels(x)
            and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and not (self.cos.requires_grad or self.sin.requires_grad)
            and self.cos.dtype == self.sin.dtype == torch.float32
            and self.cos.device == self.sin.device == x.device
        )

    def _check(self, x: Tensor) -> None:
        """Raise unless the shape is that of this rotation's rows."""
        *batch, rows, head_dim = self.cos.shape
        fits = x.dim() == 4 and x.shape[1] == rows and x.shape[-1] == head_dim
        if not fits or (batch and batch[0] not in (1, x.shape[0])):
            of = "batch" if batch in ([], [1]) else str(batch[0])
            raise ValueError(
                f"this rotation needs shape ({of}, {rows}, heads, {head_dim}); got {tuple(x.shape)}"
            )


def rotate_both(
    rope: Callable[[Tensor], Tensor], query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """``rope(query), rope(key)``; of a `Rotation`, or its `__call__`, by one kernel if possible."""
    rotation = rope.__self__ if isinstance(rope, MethodType) else rope
    alike = query.dtype == key.dtype and query.shape[:1] == key.shape[:1]
    if not (
        type(rotation) is Rotation
        and alike
        and rotation._fits_one_kernel(query)
        and rotation._fits_one_kernel(key)
    ):
        return rope(query), rope(key)
    rotation._check(query)
    rotation._check(key)
    return rotate(query, key, *rotation)


class RotaryEmbedding(nn.Module):
    """Turns global positions into the rotation of RoFormer (arXiv 2104.09864, section 3.2.2).

    Pairs are (i, i + head_dim // 2), as in GPT-NeoX and Llama. Angles are computed in float64: in
    float32 a position beyond 2^24 is not even representable.

    Args:
        head_dim: size of a head; even.
        theta: base of the wavelengths; pair i turns by ``theta ** (-2 i / head_dim)`` per position.

    Raises:
        TypeError: `head_dim` is not an int.
        ValueError: `head_dim` is not positive and even, or `theta` is not finite and above 1.
    """

    def __init__(self, head_dim: int, *, theta: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim = check_positive_int("head_dim", head_dim)
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim; got {head_dim}")
        self.theta = check_positive_float("theta", theta)
        if self.theta <= 1:
            raise ValueError(f"theta must be above 1; got {in_brief(theta)}")

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation for rows at these positions.

        Args:
            positions: global positions, int64, shape (local_sequence,), or (batch, local_sequence)
                where rows of a batch stand at different ones; `SequenceLayout.positions` gives a
                rank's, and `document_positions` those of packed documents.

        Returns:
            A `Rotation` on the device of `positions`.
        """
        if not isinstance(positions, Tensor) or positions.dim() not in (1, 2):
            raise TypeError(
                "positions must be a tensor of shape (local_sequence,) or (batch, local_sequence), "
                f"got {getattr(positions, 'shape', in_brief(positions))}"
            )
        pairs = torch.arange(self.head_dim // 2, dtype=torch.float64, device=positions.device)
        # How far each pair turns from a position to the next.
        turns = torch.pow(self.theta, pairs * (-2 / self.head_dim))
        angles = positions.unsqueeze(-1) * turns
        cos, sin = angles.cos().float(), angles.sin().float()
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def agreed_positions(
    tokens: Tensor,
    group: Group,
    layout: SequenceLayout | None,
    *,
    documents: Integers | None = None,
    lengths: Integers | None = None,
    labels: Tensor | None = None,
) -> tuple[Tensor, Integers | None, list[int] | None]:
    """Rotary positions of the local rows, int64; the documents, and the lengths, as ints.

    If any rank's arguments do not fit, an error on every rank: a rank that raised alone would leave
    the others waiting for it in the first attention. The arguments are those of `LongNet.forward`
    and `TokenGenerator.prefill`. While torch.compile traces, documents are as they were given.
    """
    positions, borders, valid, failure = None, documents, None, None
    rank, world_size = place_in(group)
    try:
        positions = _positions(tokens, rank, world_size, layout)
        if labels is not None:
            check_tokens(labels, "(batch, local_sequence)", "labels")
            if labels.shape != tokens.shape:
                raise ValueError(
                    f"labels must have the shape of tokens, {tuple(tokens.shape)}; "
                    f"got {shape_in_brief(labels)}"
                )
        total = whole_length(tokens, world_size, layout)
        if lengths is not None:
            valid = checked_lengths(as_ints("lengths", lengths), len(tokens), 1, total)
        if isinstance(documents, Tensor) and torch.compiler.is_compiling():
            # Attention checks the numbers, which are not known here.
            positions = document_positions(positions, documents)
        elif documents is not None:
            borders = as_ints("documents", documents)
            known = document_borders(borders, None, total)
            positions = document_positions(positions, known)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    # What else must be equal on all ranks, the first attention compares.
    return agreed(positions, "LongNet", group, failure, device_of(tokens)), borders, valid


def checked_lengths(lengths: Sequence[int], batch: int, least: int, most: int) -> list[int]:
    """The lengths; raises a `ValueError` unless they lie in [least, most], one for each row."""
    if len(lengths) != batch:
        raise ValueError(
            f"lengths must hold one number for each of {batch} rows; got {in_words(tuple(lengths))}"
        )
    if wrong := [n for n in lengths if not least <= n <= most]:
        raise ValueError(f"lengths must lie in [{least}, {most}]; got {wrong[0]}")
    return list(lengths)


def device_of(tokens: Tensor) -> torch.device:
    """Where tokens are, also where they are no tensor."""
    return tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")


def whole_length(tokens: Tensor, world_size: int, layout: SequenceLayout | None) -> int:
    """Positions of the whole sequence, of which `tokens` are the local shard."""
    return tokens.shape[1] * world_size if layout is None else layout.length


def check_tokens(tokens: Tensor, shape: str, name: str = "tokens") -> None:
    """Raise unless tokens, or labels, are int64 of two dimensions, `shape` in words."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor, got {in_brief(tokens)}")
    if tokens.dtype != torch.int64:
        raise TypeError(f"{name} must be int64; got {tokens.dtype}")
    if tokens.dim() != 2:
        raise ValueError(f"{name} must have shape {shape}; got {shape_in_brief(tokens)}")


def _positions(tokens: Tensor, rank: int, world_size: int, layout: SequenceLayout | None) -> Tensor:
    """The global position of every local row: int64, shape (local_sequence,)."""
    check_tokens(tokens, "(batch, local_sequence)")
    rows = tokens.shape[1]
    if layout is None:
        return torch.arange(rank * rows, (rank + 1) * rows, device=tokens.device)
    check_options(layout=layout)
    layout.check_shard(rank, world_size, rows, f"got tokens of shape {tuple(tokens.shape)}")
    return layout.positions(rank, device=tokens.device)
