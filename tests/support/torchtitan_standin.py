"""The part of torchtitan's interface that our integration uses, for machines without torchtitan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn


class Module(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[Any] = None

        def build(self) -> Any:
            return self.owner(config=replace(self))

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "Config" in vars(cls):
            cls.Config.owner = cls

    def parallelize(self, parallel_dims: Any) -> None:
        for child in self.children():
            if isinstance(child, Module):
                child.parallelize(parallel_dims)


class GQAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        n_kv_heads: int | None
        head_dim: int
        inner_attention: Any

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.n_heads = config.head_dim, config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        dim = config.n_heads * config.head_dim
        kv_dim = self.n_kv_heads * config.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(dim, x, bias=False) for x in (dim, kv_dim, kv_dim))
        self.inner_attention = config.inner_attention.build()

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: Any = None) -> torch.Tensor:
        q, k, v = (w(x).view(len(x), -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        gqa = self.n_heads > self.n_kv_heads
        out = self.inner_attention(
            q, k, v, attention_masks=attention_masks, scale=None, enable_gqa=gqa
        )
        return out.contiguous().view(len(x), -1)


@dataclass(kw_only=True, slots=True)
class Layer:
    attention: Any


class Decoder(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list[Any]
        vocab_size: int = 64

    def __init__(self, config: Config) -> None:
        super().__init__()
        attentions = [layer.attention for layer in config.layers]
        self.embedding = nn.Embedding(
            config.vocab_size, attentions[0].n_heads * attentions[0].head_dim
        )
        self.layers = nn.ModuleList(attention.build() for attention in attentions)

    def forward(
        self, tokens: torch.Tensor, positions: Any = None, attention_masks: Any = None
    ) -> torch.Tensor:
        h: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h, attention_masks, positions)
        return h

    def parallelize(self, parallel_dims: Any) -> None:
        for layer in self.layers:
            layer.parallelize(parallel_dims)  # type: ignore[operator]


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    max_context_length: int = 2048


@dataclass
class ModelSpec:
    model: Any
    parallelize_fn: Callable[..., Any]


def parallelize(model: Any, *, parallel_dims: Any, training: Any, parallelism: Any) -> Any:
    model.parallelize(parallel_dims)
    return model


@dataclass
class ParallelDims:
    """What torchtitan has meshes for."""

    cp: int = 1
    tp: int = 1
    pp: int = 1
    spmd_backend: str = "spmd_types"
    tp_rank: int = 0
    group: Any = None

    def get_optional_mesh(self, name: str) -> Any:
        if name == "tp" and self.tp > 1:
            return SimpleNamespace(size=lambda: self.tp, get_local_rank=lambda: self.tp_rank)
        return self.group if name == "cp" else None


@contextmanager
def _no_typecheck() -> Iterator[None]:
    yield


def modules() -> dict[str, ModuleType]:
    """By their names, what `import torchtitan` and `import spmd_types` would find."""
    found: dict[str, ModuleType] = {}
    offers: dict[str, dict[str, Any]] = {
        "spmd_types": {"no_typecheck": _no_typecheck, "is_type_checking": lambda: False},
        "spmd_types.runtime": {"get_partition_spec": None},
        "torchtitan": {},
        "torchtitan.config": {"TrainingConfig": TrainingConfig},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.attention": {"GQAttention": GQAttention},
        "torchtitan.protocols": {},
        "torchtitan.protocols.module": {"Module": Module},
    }
    for name, offered in offers.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(offered)
    return found


INTEGRATION = "ring_dilated_attention.integrations.torchtitan"


@contextmanager
def installed() -> Iterator[Any]:
    """Our integration, imported with the stand-in in the place of torchtitan."""
    import importlib

    names = [*modules(), INTEGRATION]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(modules())
    try:
        yield importlib.import_module(INTEGRATION)
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
