"""Small models with the interface, and the class names, of prov-gigapath's and LongViT's."""

import os
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from support.torchscale_definition import config, theirs

GRID, WIDTH, FEATURES = 32, 32, 12


class DropPath(nn.Module):
    """torchscale's stochastic depth."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not (self.training and self.drop_prob):
            return x
        kept = torch.rand(len(x), 1, 1, dtype=x.dtype) >= self.drop_prob
        return x * kept / (1 - self.drop_prob)


class Layer(nn.Module):
    def __init__(self, dropout, drop_path, args):
        super().__init__()
        self.is_moe_layer = False
        self.self_attn = theirs(WIDTH, 4, args=args)
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.ffn = nn.Module()
        self.ffn.fc1, self.ffn.fc2 = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.ffn.ffn_layernorm = nn.LayerNorm(48)
        self.drop = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x, encoder_padding_mask):
        y = self.self_attn_layer_norm(x)
        y, _ = self.self_attn(query=y, key=y, value=y, key_padding_mask=encoder_padding_mask)
        x = x + self.drop_path(self.drop(y))
        y = _float64_ffn(self.ffn, self.final_layer_norm(x))
        return x + self.drop_path(self.drop(y))


class Encoder(nn.Module):
    """What both call, as torchscale's encoders are called."""

    def __init__(self, layers=2, dropout=0.0, drop_path=0.0, args=None):
        super().__init__()
        self.embed_positions = None
        self.layers = nn.ModuleList(Layer(dropout, drop_path, args) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.through = lambda layer, *inputs: layer(*inputs)  # for activation checkpointing

    def forward(
        self,
        src_tokens,
        encoder_padding_mask=None,
        return_all_hiddens=False,
        token_embeddings=None,
        features_only=False,
    ):
        x = token_embeddings
        if encoder_padding_mask is None:
            encoder_padding_mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        states = [x]
        for layer in self.layers:
            x = self.through(layer, x, encoder_padding_mask)
            states.append(x)
        return {
            "encoder_out": self.layer_norm(x),
            "encoder_states": states if return_all_hiddens else [],
            "encoder_embedding": token_embeddings,
            "encoder_padding_mask": encoder_padding_mask,
        }


class LongNetViT(nn.Module):
    """Prov-GigaPath's slide encoder: class token, embedded positions, two ways of pooling."""

    def __init__(
        self, in_chans=FEATURES, global_pool=False, dropout=0.0, drop_path_rate=0.0, args=None
    ):
        super().__init__()
        self.tile_size, self.global_pool = 256, global_pool
        self.patch_embed: Any = nn.Module()
        self.patch_embed.proj = nn.Linear(in_chans, WIDTH)
        self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.pos_embed: torch.Tensor
        self.register_buffer("pos_embed", table_of_positions(), persistent=False)
        self.encoder = Encoder(2, dropout, drop_path_rate, args)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, x, coords, all_layer_embed=False):
        row, column = (coords // self.tile_size).long().unbind(-1)
        x = self.patch_embed.proj(x) + self.pos_embed[0, row * GRID + column + 1]
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([first, x], 1)
        if all_layer_embed:
            found = self.encoder(src_tokens=None, token_embeddings=x, return_all_hiddens=True)
            states = found["encoder_states"]
        else:
            states = [self.encoder(src_tokens=None, token_embeddings=x)["encoder_out"]]
        if self.global_pool:
            return [self.norm(state[:, 1:].mean(1)) for state in states]
        return [self.norm(state)[:, 0] for state in states]


class LongViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.encoder = Encoder()

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).mT
        return self.encoder(src_tokens=None, token_embeddings=x)["encoder_out"]


class LongViTForTCGAClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LongViT()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, image):
        return self.head(self.model(image).mean(1))


def table_of_positions():
    """Sines and cosines of the cells of a grid, in float32: nothing for the class token."""
    rates = 10_000.0 ** (-np.arange(WIDTH // 4) / (WIDTH // 4))
    angles = np.arange(GRID)[:, None] * rates
    axis = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    second, first = np.tile(axis, (GRID, 1)), np.repeat(axis, GRID, 0)
    table = np.concatenate([np.zeros((1, WIDTH)), np.concatenate([second, first], 1)])
    return torch.from_numpy(table).float()[None]


def initialized(model, seed=0):
    """The model in float64, all of its parameters random."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def slide(tiles, *, batch=1, seed=1, features=FEATURES):
    """Features (batch, tiles, features) and coordinates in pixels (batch, tiles, 2)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tiles, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, GRID, (batch, tiles, 2), generator=generator) * 256


def create_model(pretrained, model_arch, in_chans, local_dir="", **options):
    """Prov-GigaPath's function of that name, which ends up with random weights."""
    assert not pretrained
    return initialized(LongNetViT(in_chans, **options)).float()


def gigapath(**options):
    """A LongNetViT of random weights in float64: prov-gigapath's own where GIGAPATH names it."""
    if "GIGAPATH" not in os.environ:
        return initialized(LongNetViT(**options))
    sys.path.insert(0, os.environ["GIGAPATH"])
    with np.printoptions(legacy="1.25"):  # it evaluates the text of a list of numpy's integers
        from gigapath.slide_encoder import LongNetViT as Theirs
        from torchscale.component import multihead_attention

        options = {"dropout": 0.0, "drop_path_rate": 0.0, **options}
        norm = partial(nn.LayerNorm, eps=1e-6)  # as their registered models have
        model: Any = Theirs(FEATURES, 256, 12, GRID, norm_layer=norm, **options)
    multihead_attention.flash_attn_func = _softmax
    model.encoder.layers = model.encoder.layers[:2]  # there is no configuration of two
    for layer in model.encoder.layers:  # whose GELU is in float32 otherwise
        layer.ffn.forward = partial(_float64_ffn, layer.ffn)
    return initialized(model)


def _float64_ffn(ffn, x):
    return ffn.fc2(ffn.ffn_layernorm(F.gelu(ffn.fc1(x))))


def _softmax(q, k, v, *rest):
    """What prov-gigapath takes of flash-attn, for CPUs and float64."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, -1), v), scores.logsumexp(-1)


def small(**changes):
    """torchscale's configuration with branches for a few tiles."""
    return config(**{"segment_length": [6, 17, 64], "dilated_ratio": [1, 2, 4], **changes})
