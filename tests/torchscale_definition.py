"""torchscale's dilated attention from its definition: padded with zeros, row by row, in float64."""

import math

import torch

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
