"""Rotary position embedding by global positions (RoFormer, Su et al. 2021, arXiv 2104.09864)."""

from __future__ import annotations

import sys
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..documents import Integers, in_words, ints_or_tensor
from ..parallel import is_dtensor, of_own_part
from ..pattern import check_positive_int, in_brief, shape_in_brief
from .hooks import runs_hooks


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

    Attributes:
        cos: float32, shape (local_sequence, head_dim // 2), or (batch, local_sequence,
            head_dim // 2) where rows of a batch stand at different positions; that batch may be 1.
        sin: float32, the shape of `cos`.
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
        _check_rows(self.cos, x, 2 * self.cos.shape[-1])
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        cos, sin = self.cos.unsqueeze(-2), self.sin.unsqueeze(-2)
        first, second = rows.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)

    def wide(self) -> WideRotation:
        """The `WideRotation` of the same positions."""
        cos, sin = torch.cat((self.cos, self.cos), -1), torch.cat((-self.sin, self.sin), -1)
        return WideRotation(cos.unsqueeze(-2), sin.unsqueeze(-2))


class WideRotation(NamedTuple):
    """A `Rotation` whose tables are as wide as a head: fewer operations, and twice the memory.

    Attributes:
        cos: float32, shape (batch, local_sequence, 1, head_dim), where that batch may be 1, or
            without it: every cosine twice, ``[c, c]``.
        sin: float32, the shape of `cos`: ``[-s, s]``.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate every row, as a `Rotation` does.

        Args:
            x: floating point, shape (batch, local_sequence, heads, head_dim).

        Raises:
            ValueError: the batch, the rows or the head_dim of `x` are not those of this rotation.
        """
        if is_dtensor(x):
            return of_own_part(self.__call__, x)
        _check_rows(self.cos.squeeze(-2), x, self.cos.shape[-1])
        return self.turned(x)

    def turned(self, x: Tensor) -> Tensor:
        """The same, of rows that are known to fit."""
        # Computed in float32 at least, as torch promotes; a cast would be one more operation.
        both = torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)
        return both if both.dtype == x.dtype else both.to(x.dtype)

    def fits_kernels(self, rows: Tensor, head_dim: int) -> bool:
        """Whether `kernels.turn_heads_` can take the tables, for heads of (batch, rows, ...)."""
        batch, count, _ = rows.shape
        shapes = [(1, count, 1, head_dim), (batch, count, 1, head_dim)]
        return all(
            x.shape in shapes
            and (x.dtype, x.device) == (torch.float32, rows.device)
            and x.is_contiguous()
            for x in self
        )

    def narrow(self) -> Rotation:
        """The `Rotation` of the same positions: views."""
        half = self.cos.shape[-1] // 2
        return Rotation(self.cos[..., 0, :half], self.sin[..., 0, half:])


def _check_rows(table: Tensor, x: Tensor, head_dim: int) -> None:
    """Raise unless `x` has the rows of the table."""
    shape = table.shape
    fits = x.dim() == 4 and x.shape[1] == shape[-2] and x.shape[-1] == head_dim
    if not fits or (len(shape) == 3 and shape[0] not in (1, x.shape[0])):
        batch = "batch" if len(shape) == 2 or shape[0] == 1 else str(shape[0])
        raise ValueError(
            f"this rotation needs shape ({batch}, {shape[-2]}, heads, {head_dim}); "
            f"got {tuple(x.shape)}"
        )


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
        if isinstance(theta, bool) or not isinstance(theta, int | float):
            raise TypeError(f"theta must be a number, got {in_brief(theta)}")
        if not 1 < theta <= sys.float_info.max:
            raise ValueError(f"theta must be finite and above 1; got {in_brief(theta)}")
        self.theta = float(theta)
        # No buffer: a model's dtype does not change it.
        self._signed: tuple[float, Tensor] | None = None

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation for rows at these positions.

        Args:
            positions: global positions, int64, shape (local_sequence,), or (batch, local_sequence)
                where rows of a batch stand at different ones; `SequenceLayout.positions` gives a
                rank's, and `document_positions` those of packed documents.

        Returns:
            A `Rotation` on the device of `positions`.
        """
        _check_positions(positions)
        angles = positions.to(torch.float64).unsqueeze(-1) * self._frequencies(positions.device)
        return Rotation(angles.cos().float(), angles.sin().float())

    def wide(self, positions: Tensor) -> WideRotation:
        """The same rotation from tables as wide as a head: for a few rows, as in decoding.

        Args:
            positions: as for `forward`.

        Returns:
            A `WideRotation` on the device of `positions`.
        """
        _check_positions(positions)
        device, known = positions.device, self._signed
        if known is None or known[0] != self.theta or known[1].device != device:
            frequencies = self._frequencies(device)
            known = self._signed = self.theta, torch.cat((-frequencies, frequencies))
        # Of a negative angle the cosine is the same, and the sine has the sign that it needs.
        angles = positions[..., None, None] * known[1]
        return WideRotation(angles.cos().float(), angles.sin().float())

    def _frequencies(self, device: torch.device) -> Tensor:
        """The angle that each pair turns by from a position to the next: float64."""
        pairs = torch.arange(self.head_dim // 2, dtype=torch.float64, device=device)
        return torch.pow(self.theta, pairs * (-2 / self.head_dim))

    def extra_repr(self) -> str:
        """What `repr` shows of the arguments."""
        return f"{self.head_dim}, theta={self.theta:g}"


def is_plain_rope(rope: nn.Module) -> bool:
    """Whether a module computes what `RotaryEmbedding` does: no subclass, and no hooks."""
    return type(rope) is RotaryEmbedding and not runs_hooks(rope)


def wide_rotation(rope: nn.Module, positions: Tensor) -> WideRotation:
    """A model's rotation as wide as a head, also where the model has a rotation of its own.

    Args:
        rope: a `RotaryEmbedding`, or a module that returns a `Rotation` for positions.
        positions: int64, shape (batch, local_sequence).
    """
    if is_plain_rope(rope):
        return cast(RotaryEmbedding, rope).wide(positions)
    rotation: Rotation = rope(positions)
    return rotation.wide()


def _check_positions(positions: Tensor) -> None:
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2):
        is_tensor = isinstance(positions, Tensor)
        got = shape_in_brief(positions) if is_tensor else in_brief(positions)
        raise TypeError(
            "positions must be a tensor of shape (local_sequence,) or (batch, local_sequence), "
            f"got {got}"
        )
