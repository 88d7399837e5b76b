"""Dilated attention in torchtitan: an inner attention, and a model spec that uses it.

torchtitan's own inner attentions gather the keys and values of all context-parallel ranks. This one
leaves them sharded, and only the dilated rows that a query sees travel. Trainer, model, dataloader
and checkpoints are torchtitan's, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import GQAttention
from torchtitan.protocols.module import Module

from ..exchange import agree, resolve_exchange, together
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..nn import document_positions
from ..options import Schedule, check_options
from ..pattern import DilatedPattern
from ..tiles import Backend

__all__ = ["DilatedInnerAttention", "PackedTokens", "with_dilated_attention"]

_NAME = "the torchtitan model"
_LAYOUTS: dict[str | None, str] = {"headtail": "zigzag", None: "contiguous"}
"""How torchtitan shards the tokens, by its load balancer."""


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """The documents and the layout of the tokens of a forward pass.

    Attributes:
        documents: int64 on the host, cumulative lengths ``[0, ..., n]`` of the documents that are
            packed in the n tokens of all context-parallel ranks.
        layout: which of these tokens each rank holds; None: contiguous equal shards.
    """

    documents: Tensor
    layout: SequenceLayout | None


class DilatedInnerAttention(Module):  # type: ignore[misc]
    """`dilated_attention` as an inner attention of torchtitan's `GQAttention`.

    `with_dilated_attention` makes its config and hands it the documents of each forward pass.

    Args:
        config: a `DilatedInnerAttention.Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        """How the attention is computed.

        Attributes:
            pattern: which keys each head sees.
            num_kv_heads: key and value heads of the whole layer, over all tensor-parallel ranks.
            exchange: as of `dilated_attention`.
            backend: as of `dilated_attention`.
        """

        pattern: DilatedPattern
        num_kv_heads: int
        exchange: Schedule = "auto"
        backend: Backend = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._cp: Any = None
        self._head_slice: tuple[int, int, int] | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Take this rank's context-parallel group and its heads; nothing is redistributed.

        The sharding that torchtitan has set on the config is that of its own attentions, which
        gathers keys and values, and is left aside.

        Args:
            parallel_dims: torchtitan's `ParallelDims`.
        """
        self._cp = parallel_dims.get_optional_mesh("cp")
        if (tp := parallel_dims.get_optional_mesh("tp")) is not None:
            heads = self._config.num_kv_heads // tp.size()
            start = tp.get_local_rank() * heads
            self._head_slice = (start, start + heads, self._config.num_kv_heads)

    def forward(
        self,
        q_TNH: Tensor,  # noqa: N803  # torchtitan's names
        k_TNH: Tensor,  # noqa: N803
        v_TNH: Tensor,  # noqa: N803
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend to the tokens of all context-parallel ranks.

        Args:
            q_TNH: shape (local_tokens, local_heads, head_dim).
            k_TNH: shape (local_tokens, local_kv_heads, head_dim).
            v_TNH: the shape of `k_TNH`.
            attention_masks: the `PackedTokens` of this forward pass.
            scale: factor on the scores; None means ``head_dim ** -0.5``.
            enable_gqa: not needed; the shapes tell.

        Returns:
            The shape and dtype of `q_TNH`.

        Raises:
            ValueError: `attention_masks` is something else; and see `dilated_attention`.
        """
        if not isinstance(attention_masks, PackedTokens):
            raise ValueError(
                "DilatedInnerAttention needs the documents of the batch, which the model spec of "
                "with_dilated_attention passes on; got attention_masks of type "
                f"{type(attention_masks).__name__}"
            )
        with spmd.no_typecheck():
            out: Tensor = dilated_attention(
                q_TNH[None],
                k_TNH[None],
                v_TNH[None],
                self._config.pattern,
                is_causal=True,
                scale=scale,
                documents=attention_masks.documents,
                group=self._cp,
                layout=attention_masks.layout,
                exchange=self._config.exchange,
                backend=self._config.backend,
                head_slice=self._head_slice,
            )[0]
        if spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(q_TNH), get_partition_spec(q_TNH))
        return out


def with_dilated_attention(
    spec: Any, pattern: DilatedPattern, *, exchange: Schedule = "auto", backend: Backend = "auto"
) -> Any:
    """A torchtitan model spec whose attentions are dilated.

    Documents are those of torchtitan's dataloader: attention never crosses a restart of
    `positions`. Context parallelism takes the load balancers "headtail" and None. torchtitan's
    figures of FLOPs and MFU keep counting dense attention.

    Args:
        spec: a `ModelSpec`, as a `model_registry` returns it, of a decoder whose attentions are
            `GQAttention`; it is left as it is.
        pattern: which keys each head sees.
        exchange: how rows travel between ranks, ``"auto"``, the default, or one of those of
            `AttentionOptions`.
        backend: kernels that compute the tiles, ``"auto"``, the default, or one of those of
            `AttentionOptions`.

    Returns:
        A new `ModelSpec`.

    Raises:
        ImportError: this torchtitan is older than its main branch of 2026-08-21, as 0.3.0 is.
        TypeError: `pattern` is not a `DilatedPattern`.
        ValueError: a layer has another kind of attention, or an option has an unknown value.
    """
    if not hasattr(TrainingConfig, "max_context_length"):  # there tokens have a batch dimension
        raise ImportError(
            "dilated attention in torchtitan needs torchtitan's main of 2026-08-21 or newer: pip "
            "install git+https://github.com/pytorch/torchtitan"
        )
    check_options(pattern=pattern, exchange=exchange, backend=backend)
    layers = []
    for index, layer in enumerate(spec.model.layers):
        attention = layer.attention
        if not isinstance(attention, GQAttention.Config):
            raise ValueError(
                f"layers[{index}].attention must be a GQAttention.Config; got "
                f"{type(attention).__qualname__}, which has no dilated attention"
            )
        inner = DilatedInnerAttention.Config(
            pattern=pattern,
            num_kv_heads=attention.n_kv_heads or attention.n_heads,
            exchange=exchange,
            backend=backend,
        )
        layers.append(replace(layer, attention=replace(attention, inner_attention=inner)))
    model = replace(spec.model, layers=layers)
    return replace(spec, model=model, parallelize_fn=partial(_parallelize, spec.parallelize_fn))


def _parallelize(
    function: Callable[..., Any],
    model: Any,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    **others: Any,
) -> Any:
    """Call torchtitan's function, and have each forward pass find its documents."""
    balancer, dims = parallelism.context_parallel_load_balancer, parallel_dims
    backend, has_graphs = dims.spmd_backend, not training.disable_cuda_graphs
    for is_refused, needed, got in (
        (
            dims.cp > 1 and balancer not in _LAYOUTS,
            "context_parallel_load_balancer 'headtail' or None",
            balancer,
        ),
        (dims.pp > 1, "pipeline_parallel_degree 1", dims.pp),
        (dims.tp > 1 and backend != "spmd_types", "spmd_backend 'spmd_types'", backend),
        # The documents of a batch are read on the host.
        (has_graphs and torch.cuda.is_available(), "disable_cuda_graphs True", False),
    ):
        if is_refused:
            raise ValueError(f"dilated attention in torchtitan needs {needed}; got {got!r}")
    model = function(
        model, parallel_dims=parallel_dims, training=training, parallelism=parallelism, **others
    )
    cp, layout = dims.get_optional_mesh("cp"), _LAYOUTS.get(balancer, "contiguous")
    hook = partial(_give_documents, cp, layout)
    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return model


def _give_documents(
    cp: Any, name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a forward pass, find its documents: they begin where positions restart."""
    positions = args[1] if len(args) > 1 else kwargs.get("positions")
    if positions is None or len(args) > 2 or kwargs.get("attention_masks") is not None:
        raise ValueError(
            "a model with dilated attention takes tokens and positions, of which the documents "
            "are found; attention_masks must be left out"
        )
    ends = resolve_exchange(cp)
    with spmd.no_typecheck():
        ids = positions.detach().cpu()
        total = len(ids) * ends.world_size
        layout = SequenceLayout.named(name, total, ends.world_size, is_causal=True)
        held = layout.positions(ends.rank, device=ids.device)
        agree(_NAME, ends, {"local_tokens": len(ids)}, None, positions.device)
        begun = held[ids == 0].tolist()
        with ends.calls.enter(_NAME, "positions"):
            starts = {0, *chain.from_iterable(ends.share(begun))}
        borders = [*sorted(starts), total]
        with together(_NAME, ends, positions.device):
            if not torch.equal(ids, document_positions(held, borders)):
                raise ValueError(
                    "positions must count up from 0 in every document, and the layout of the "
                    f"tokens of all context-parallel ranks must be {name}"
                )
        packed = PackedTokens(documents=torch.tensor(borders), layout=layout)
    return args, {**kwargs, "attention_masks": packed}
