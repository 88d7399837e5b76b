"""torchscale's dilated attention from its definition: padded with zeros, row by row, in float64."""

import math
import types

import torch
from torch import nn

PATTERN = {
    "gigapath": ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)),
    "longvit": ((1024, 4096, 32768, 262144, 1048576), (1, 2, 4, 8, 16)),
}


def zero_padded_cells(length, segment_length, rate, heads):
    """Of every cell: its head, and its positions; those that do not exist are zero keys."""
    w = min(segment_length, length)
    for start in range(0, length, w):
        for head in range(heads):
            offset = head // math.ceil(heads / rate)
            positions = range(start + offset, start + offset + math.ceil(w / rate) * rate, rate)
            exists = [p < min(start + w, length) for p in positions]
            yield (
                head,
                [p for p, e in zip(positions, exists, strict=True) if e],
                exists.count(False),
            )


def torchscale_by_definition(query, key, value, segment_lengths, rates, *, is_causal=False):
    """out (batch, n, heads, head_dim) and lse (batch, heads, n); autograd sees constant weights.

    The lse of a row that no branch covers is -inf.
    """
    batch, length, heads, dim = query.shape
    outs, lses = [], []
    for segment_length, rate in zip(segment_lengths, rates, strict=True):
        out = query.new_zeros(query.shape)
        lse = query.new_full((batch, heads, length), -math.inf)
        for head, real, zeros in zero_padded_cells(length, segment_length, rate, heads):
            if not real:
                continue
            q, k, v = (
                torch.cat([x[:, real, head], x.new_zeros(batch, zeros, dim)], 1)
                for x in (query, key, value)
            )
            scores = q @ k.mT / math.sqrt(dim)
            if is_causal:
                later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            rows = (scores.softmax(-1) @ v)[:, : len(real)]
            at = torch.tensor(real)
            out = out.index_put((torch.arange(batch)[:, None], at, torch.tensor(head)), rows)
            lse[:, head, at] = scores.logsumexp(-1)[:, : len(real)].detach()
        outs.append(out)
        lses.append(lse)
    with torch.no_grad():
        merged = torch.logsumexp(torch.stack(lses), 0)
        weights = [torch.exp(lse - merged).nan_to_num(0) for lse in lses]
    mixed = sum(w.transpose(1, 2)[..., None] * o for w, o in zip(weights, outs, strict=True))
    return mixed, merged


SEGMENTS, RATES = (16, 23, 64), (1, 2, 4)


def config(**changes):
    values = {
        "segment_length": list(SEGMENTS),
        "dilated_ratio": list(RATES),
        "layernorm_eps": 1e-5,
        "xpos_rel_pos": False,
        "xpos_scale_base": 512,
        "flash_attention": True,
        "seq_parallel": False,
        "multiway": False,
    }
    return types.SimpleNamespace(**{**values, **changes})


def theirs(width=32, heads=8, *, subln=True, args=None, dropout=0.0):
    """A module with the shape, and the class name, of torchscale's."""

    class DilatedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.args = args or config()
            self.embed_dim, self.num_heads, self.head_dim = width, heads, width // heads
            self.scaling, self.dropout = self.head_dim**-0.5, dropout
            self.self_attention, self.encoder_decoder_attention = True, False
            self.k_proj = nn.Linear(width, width)
            self.v_proj = nn.Linear(width, width)
            self.q_proj = nn.Linear(width, width)
            self.out_proj = nn.Linear(width, width)
            self.inner_attn_ln = nn.LayerNorm(width, eps=self.args.layernorm_eps) if subln else None
            self.dropout_module = nn.Dropout(dropout)
            self.xpos = None

        def forward(self, query, key, value, is_causal=False, **others):
            q, k, v = (
                projection(x).unflatten(-1, (self.num_heads, self.head_dim))
                for projection, x in (
                    (self.q_proj, query),
                    (self.k_proj, key),
                    (self.v_proj, value),
                )
            )
            segments, rates = self.args.segment_length, self.args.dilated_ratio
            out, _ = torchscale_by_definition(q, k, v, segments, rates, is_causal=is_causal)
            out = out.flatten(2)
            if self.inner_attn_ln is not None:
                out = self.inner_attn_ln(out)
            return self.out_proj(out), None

    return DilatedAttention()
