"""Dilated attention as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..exchange import one_group
from ..functional import BRANCH_GRADIENTS, EXCHANGES, BranchGradients, Schedule, dilated_attention
from ..pattern import DilatedPattern, check_choice, check_head_slice, in_brief
from ..tiles import BACKENDS, Backend

if TYPE_CHECKING:
    from ..documents import Integers
    from ..exchange import Group
    from ..layout import SequenceLayout


class DilatedAttention(nn.Module):
    """`dilated_attention` with its options fixed: no parameters, no projections.

    Args:
        pattern: which keys each head sees.
        is_causal: whether a query sees only keys at its own position and before.
        scale: factor on the scores; None means ``head_dim ** -0.5``.
        group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which positions each rank holds; None means contiguous equal shards.
        branch_gradients: ``"exact"``, the default, differentiates the whole function;
            ``"detached"`` all but the weights that mix the branches, as torchscale does.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"``, the default, gathers where all of them are at most the size of a shard.
        backend: kernels that compute the tiles: ``"auto"``, the default, takes the fastest that
            supports the tensors; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``, ``"flash"``,
            ``"efficient"``, ``"triton"`` and ``"eager"`` take that one or raise.
        head_slice: (start, stop, total): the KV heads are heads start to stop (excluded) of a layer
            with total of them, and have their offsets and branches. None: they are all.

    Raises:
        TypeError: `pattern` is not a `DilatedPattern`, or `head_slice` not three ints.
        ValueError: `branch_gradients`, `exchange`, `backend` or `head_slice` has an unknown value.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
        branch_gradients: BranchGradients = "exact",
        exchange: Schedule = "auto",
        backend: Backend = "auto",
        head_slice: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pattern, DilatedPattern):
            raise TypeError(f"pattern must be a DilatedPattern; got {in_brief(pattern)}")
        check_choice("exchange", exchange, EXCHANGES)
        check_choice("backend", backend, BACKENDS)
        self.pattern = pattern
        self.is_causal = is_causal
        self.scale = scale
        self.group = one_group(group, mesh)
        self.layout = layout
        check_choice("branch_gradients", branch_gradients, BRANCH_GRADIENTS)
        self.branch_gradients = branch_gradients
        self.exchange = exchange
        self.backend = backend
        self.head_slice = None if head_slice is None else check_head_slice(head_slice)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        documents: Integers | None = None,
        lengths: Integers | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: shape (batch, local_sequence, heads, head_dim).
            key: shape (batch, local_sequence, kv_heads, head_dim); kv_heads divides heads.
            value: the shape of `key`.
            documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole sequence
                of n positions (not in this rank's shard): ints, or a 1-D int32 or int64 tensor;
                attention never crosses their borders. None: one document.
            lengths: (batch,) ints: row b of the batch holds that many valid positions of the whole
                sequence and padding behind them. None: no padding.
            key_padding_mask: the local shard of a right padding, bool, shape (batch,
                local_sequence), True where a position is padding; `lengths` is cheaper.

        Returns:
            The shape and dtype of `query`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is not supported, or the ranks disagree about one; raised on
                every rank, naming the ranks at fault.
        """
        out: Tensor = dilated_attention(
            query,
            key,
            value,
            self.pattern,
            is_causal=self.is_causal,
            scale=self.scale,
            documents=documents,
            lengths=lengths,
            key_padding_mask=key_padding_mask,
            group=self.group,
            layout=self.layout,
            exchange=self.exchange,
            backend=self.backend,
            branch_gradients=self.branch_gradients,
            head_slice=self.head_slice,
        )
        return out

    def extra_repr(self) -> str:
        """What `repr` shows of the arguments."""
        heads = "" if self.head_slice is None else f", head_slice={tuple(self.head_slice)}"
        return f"{self.pattern}, is_causal={self.is_causal}{heads}"
