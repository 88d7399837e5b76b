"""What every tile back end offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from ..kernels import profile_of

ALIGNMENT = 16
"""Bytes of the largest load of a GPU's threads, and of what its TMA unit takes addresses in."""


Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk and dv."""


class TileInputs(NamedTuple):
    """What the forward of a tile takes.

    q (batch, heads, queries, head_dim); k, v (batch, heads, keys, head_dim): strided views, the
    last dimension contiguous, of tensors that the back end `reads`. Rows of different heads may lie
    between each other. With `is_causal`, queries and keys are equally many and row i sees keys 0 to
    i. With `band`, row i sees the keys j with ``band[0] <= j - i <= band[1]``, and every row and
    every key is in such a pair; only back ends that `takes_bands` are given one. With `softcap` c,
    scores s become c * tanh(s / c); only back ends that `takes_softcap` are given it. `memo`
    is a back end's cache for tiles of these shapes, strides, dtypes, device and options, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    is_causal: bool
    scale: float
    memo: dict[Any, Any] | None = None
    band: tuple[int, int] | None = None
    softcap: float | None = None

    def sides(self, rows: int) -> tuple[int, int]:
        """The band as flash-attention takes a window, counted from aligned last rows.

        `rows`: the dimension of the rows.
        """
        assert self.band is not None
        more = self.k.shape[rows] - self.q.shape[rows]
        return more - self.band[0], self.band[1] - more


class TileGradients(NamedTuple):
    """What the backward of a tile takes besides `TileInputs`: the MERGED result of its queries.

    dout, out (batch, heads, queries, head_dim), the last dimension contiguous; lse (batch, heads,
    queries), float32, or float64 for float64 inputs. All may be strided views.
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TileBackend:
    """What computes a tile.

    Attributes:
        name: what users call it.
        forward: ``out = softmax(scale q k^T) v`` and its lse (natural log).
        backward: the tile's share of dq, dk, dv: ``p = exp(scale q k^T - lse)``,
            ``ds = scale p (dout v^T - delta)``, ``dq = ds k``, ``dk = ds^T q``, ``dv = p^T dout``.
            It comes in the dtype of the inputs or wider, as out does.
        refusal: says why it cannot take (device, dtype, head_dim); None if it can.
        forward_into: like `forward`, but writes out and lse into the views that it is given (the
            last dimension of both contiguous); None if it cannot.
        backward_into: like `backward`, but writes dq, dk and dv into the views that it is given;
            None if it cannot.
        backward_workspace: bytes a row of queries that `backward` allocates for itself, besides dq,
            dk and dv, given head_dim.
        reads: whether it reads views of a tensor (batch, sequence, heads, head_dim) as it is: one
            of `reads_any_rows`, `reads_separate_rows`, `reads_aligned_rows`. Others are copied.
        wants_one_layout: whether `backward` copies q, out and dout where their strides differ.
        rows_first: whether it takes views as (batch, rows, heads, head_dim): see `ordered`. lse
            and what `forward` and `backward` return are as for any other.
        keeps_calls: whether a call like an earlier one takes the CPU little time, by what the back
            end keeps in `TileInputs.memo`.
        takes_groups: whether k and v may have fewer heads than q, each for the query heads that
            follow one another.
        takes_bands: whether it computes tiles of windows.
        takes_softcap: whether it computes tiles with a softcap.
        repeats: whether `backward` gives the same bits each time where `wants_same_bits`.
    """

    name: str
    forward: Callable[[TileInputs], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[TileInputs, TileGradients], Gradients]
    refusal: Callable[[torch.device, torch.dtype, int], str | None]
    forward_into: Callable[[TileInputs, torch.Tensor, torch.Tensor], None] | None = None
    backward_into: (
        Callable[[TileInputs, TileGradients, torch.Tensor, torch.Tensor, torch.Tensor], None] | None
    ) = None
    backward_workspace: Callable[[int], int] = lambda head_dim: 0
    reads: Callable[[torch.Tensor], bool] = lambda tensor: reads_aligned_rows(tensor)
    wants_one_layout: bool = False
    rows_first: bool = False
    keeps_calls: bool = False
    takes_groups: bool = False
    takes_bands: bool = False
    takes_softcap: bool = False
    repeats: bool = True

    def ordered(self, *views: torch.Tensor) -> list[torch.Tensor]:
        """(batch, heads, rows, head_dim) views with their dimensions in the order it takes."""
        return [view.transpose(1, 2) for view in views] if self.rows_first else [*views]


def wants_same_bits() -> bool:
    """Whether ``torch.use_deterministic_algorithms(True)`` holds: equal calls, equal bits.

    With ``warn_only=True`` it does not: torch then takes its fast kernels for attention, too.
    """
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def reads_any_rows(tensor: torch.Tensor) -> bool:
    """head_dim is contiguous. Strides may be 0, and rows may overlap."""
    return tensor.stride(-1) == 1


def reads_separate_rows(tensor: torch.Tensor) -> bool:
    """As `reads_any_rows`, and no two elements share memory: no stride is 0, no rows overlap.

    Kernels of others allocate their results by the strides of their inputs, and call BLAS with
    them: where rows share memory, torch's CPU kernel is wrong without a word.
    """
    if tensor.stride(-1) != 1:
        return False
    end = 0  # the last element of what the dimensions of smaller strides hold
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return False
            end += stride * (size - 1)
    return True


def reads_aligned_rows(tensor: torch.Tensor) -> bool:
    """As `reads_separate_rows`, and every row starts at a multiple of 16 bytes."""
    return (
        tensor.data_ptr() % ALIGNMENT == 0
        and all(stride * tensor.element_size() % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
        and reads_separate_rows(tensor)
    )


def in_row_blocks(backend: TileBackend) -> TileBackend:
    """The same back end, given a tile with a band or a softcap as blocks of rows and their keys.

    For kernels whose mask, or scores, have an entry for each query and key.
    """

    def whole(t: TileInputs) -> bool:
        return t.band is None and t.softcap is None

    def blocks(t: TileInputs) -> Iterator[tuple[slice, slice, TileInputs]]:
        queries, keys = t.q.shape[2], t.k.shape[2]
        low, high = t.band or (-queries, 0 if t.is_causal else keys)
        sees_all = t.band is None and not t.is_causal
        size = min(max(_MASK // min(high - low + 1, keys), 16), 256)
        for start in range(0, queries, size):
            rows = slice(start, min(start + size, queries))
            seen = slice(max(start + low, 0), min(rows.stop + high, keys))
            behind = start - seen.start
            part = t._replace(
                q=t.q[:, :, rows],
                k=t.k[:, :, seen],
                v=t.v[:, :, seen],
                is_causal=False,
                band=None if sees_all else (low + behind, high + behind),
                memo=None,
            )
            yield rows, seen, part

    def forward(t: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
        if whole(t):
            return backend.forward(t)
        outs, lses = zip(*(backend.forward(part) for *_, part in blocks(t)), strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(t: TileInputs, g: TileGradients) -> Gradients:
        if whole(t):
            return backend.backward(t, g)
        # Keys of two blocks get gradients of both.
        wide = torch.promote_types(t.k.dtype, torch.float32)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (t.k, t.v))
        dqs = []
        for rows, seen, part in blocks(t):
            dq, *found = backend.backward(part, TileGradients(*(x[:, :, rows] for x in g)))
            dqs.append(dq)
            for total, each in zip((dk, dv), found, strict=True):
                total[:, :, seen] += each
        return torch.cat(dqs, 2), dk, dv

    return replace(backend, forward=forward, backward=backward, takes_bands=True)


_MASK = 1 << 18
"""Entries of the mask, or scores of a head, of a block, about."""


AMPERE = (8, 0)
"""A compute capability: the least that products of bfloat16 compile for."""


def refuse_all_but(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    multiple: int = 1,
    largest: int | None = None,
    from_ampere_on: tuple[torch.dtype, ...] = (),
) -> Callable[[torch.device, torch.dtype, int], str | None]:
    """The `refusal` of a kernel for one device type, some dtypes, and some head_dims.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        dtypes: which it takes.
        multiple: what a head_dim has to be a multiple of.
        largest: the largest head_dim; None: any.
        from_ampere_on: dtypes that it takes on NVIDIA GPUs from compute capability 8.0 on only.
    """

    def refusal(on: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if on.type != device:
            return f"it runs on {device}, the inputs are on {on.type}"
        if dtype not in dtypes:
            return f"it takes {', '.join(map(_short, dtypes))}, the inputs are {_short(dtype)}"
        if head_dim % multiple or (largest is not None and head_dim > largest):
            limit = "" if largest is None else f" up to {largest}"
            return f"it takes a head_dim that is a multiple of {multiple}{limit}, not {head_dim}"
        if on.type != "cuda" or dtype not in from_ampere_on or torch.version.hip is not None:
            return None
        found = profile_of(on).capability
        if found >= AMPERE:
            return None
        what = "" if from_ampere_on == dtypes else f"{_short(dtype)} from "
        least, has = (".".join(map(str, each)) for each in (AMPERE, found))
        return f"it takes {what}compute capability {least} and above, the device has {has}"

    return refusal


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
