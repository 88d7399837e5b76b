"""The method on one page: exact ring dilated attention in plain PyTorch, forward and backward.

    torchrun --nproc-per-node 3 examples/ring_in_one_page.py

The sequence is sharded: each rank holds the queries, keys and values of some positions. Branch
(w, r) cuts the sequence into segments of w positions; head h sees every r-th of them, from h mod r
on. All branches share one softmax. A rank computes its queries' attention to the KV rows of one
rank after the other, and merges the parts:

    lse = logaddexp(lse_1, lse_2)        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Because that is one softmax, backward needs only the merged out and lse: with delta = rowsum(dout *
out), each tile's gradients follow from its scores alone, and gradients of all tiles add up. A rank
sends a KV row only to ranks whose queries see it, once, while it computes with the rows before.

The library computes the same function. What it adds: fused kernels on views without copies, plans
whose size does not grow with the number of segments, documents, and errors that help.
"""

import torch
import torch.distributed as dist


def seen(positions, start, segment, rate, offset):
    """Which of a rank's rows lie in a segment, at the positions that a head sees."""
    inside = (positions >= start) & (positions < start + segment)
    return (inside & ((positions - start) % rate == offset)).nonzero().flatten()


def tiles(branches, layout, rank, source, heads, kv_heads):
    """(head, KV head, query rows of `rank`, KV rows of `source`) that see each other."""
    length = max(int(positions.max()) for positions in layout if len(positions)) + 1
    for segment, rate in branches:
        segment = segment or length
        for start in range(0, length, segment):
            for head in range(heads):
                kv_head = head // (heads // kv_heads)  # grouped queries share a KV head's offset
                where = (start, segment, rate, kv_head % rate)
                queries, keys = seen(layout[rank], *where), seen(layout[source], *where)
                if len(queries) and len(keys):
                    yield head, kv_head, queries, keys


def needed(branches, layout, rank, source, heads, kv_heads):
    """The (row, KV head) pairs of `source` that `rank` needs: a message, each pair in it once."""
    mask = torch.zeros(len(layout[source]), kv_heads, dtype=torch.bool)
    for _, kv_head, _, keys in tiles(branches, layout, rank, source, heads, kv_heads):
        mask[keys, kv_head] = True
    return mask


def exchange(to, rows, source, buffer):
    """Start sending `rows` and receiving `buffer`; the call that it returns waits for both."""
    both = [dist.P2POp(dist.isend, rows, to), dist.P2POp(dist.irecv, buffer, source)]
    pending = dist.batch_isend_irecv(both)

    def wait():
        for work in pending:
            work.wait()
        return buffer

    return wait


def ring(spec, layout, rank, kv):
    """(source, KV of `source`) of each rank in turn, the next message in flight meanwhile.

    Rows that this rank does not need stay NaN: whoever reads one sees it.
    """
    world_size = len(layout)
    # region ring
    current = kv
    for step in range(world_size):
        source = (rank - step) % world_size
        if step + 1 < world_size:
            to, after = (rank + step + 1) % world_size, (rank - step - 1) % world_size
            mask = needed(spec[0], layout, rank, after, *spec[1:])
            outgoing = kv[needed(spec[0], layout, to, rank, *spec[1:])]
            wait = exchange(to, outgoing, after, kv.new_empty(int(mask.sum()), *kv.shape[2:]))
        yield source, current
        if step + 1 < world_size:
            current = kv.new_full((len(layout[after]), *kv.shape[1:]), torch.nan)
            current[mask] = wait()
    # endregion ring


def scores(query, key, query_positions, key_positions, is_causal):
    """Scaled products of queries and keys, -inf where causal attention hides a key."""
    product = query @ key.T * query.shape[-1] ** -0.5
    if is_causal:
        hidden = key_positions[None, :] > query_positions[:, None]
        product = product.masked_fill(hidden, -torch.inf)
    return product


class RingDilatedAttention(torch.autograd.Function):
    """Query (rows, heads, head_dim), KV (rows, KV heads, 2, head_dim), all of one rank."""

    @staticmethod
    def forward(ctx, query, kv, branches, layout, rank, is_causal):
        """Merge the attention to each source's rows into out and lse."""
        spec = (branches, query.shape[1], kv.shape[1])
        out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
        for source, current in ring(spec, layout, rank, kv):
            for head, kv_head, q, k in tiles(branches, layout, rank, source, *spec[1:]):
                key, value = current[k, kv_head].unbind(1)
                positions = layout[rank][q], layout[source][k]
                part = scores(query[q, head], key, *positions, is_causal)
                # region merge
                merged = torch.logaddexp(lse[q, head], part.logsumexp(1))
                finite = merged.masked_fill(merged.isinf(), 0.0)  # rows that see nothing yet
                old = (lse[q, head] - finite).exp()[:, None]
                out[q, head] = out[q, head] * old + (part - finite[:, None]).exp() @ value
                lse[q, head] = merged
                # endregion merge
        ctx.save_for_backward(query, kv, out, lse)
        ctx.call = spec, layout, rank, is_causal
        return out

    @staticmethod
    def backward(ctx, dout):
        """Add up the tiles' gradients; those of received rows go back to their owner."""
        (query, kv, out, lse), (spec, layout, rank, is_causal) = ctx.saved_tensors, ctx.call
        delta, scale = (dout * out).sum(-1), query.shape[-1] ** -0.5
        dquery, dkv = torch.zeros_like(query), torch.zeros_like(kv)
        for source, current in ring(spec, layout, rank, kv):
            found = torch.zeros_like(current)  # gradients of the KV rows of `source`
            for head, kv_head, q, k in tiles(spec[0], layout, rank, source, *spec[1:]):
                key, value = current[k, kv_head].unbind(1)
                positions = layout[rank][q], layout[source][k]
                part = scores(query[q, head], key, *positions, is_causal)
                finite = lse[q, head].masked_fill(lse[q, head].isinf(), 0.0)
                weights = (part - finite[:, None]).exp()  # of the one softmax over all branches
                inner = weights * (dout[q, head] @ value.T - delta[q, head, None]) * scale
                dquery[q, head] += inner @ key
                found[k, kv_head] += torch.stack(
                    [inner.T @ query[q, head], weights.T @ dout[q, head]], 1
                )
            # Gradients go back to the rank that holds the rows; ours come from the mirrored rank.
            peer = (2 * rank - source) % len(layout)
            mine = needed(spec[0], layout, peer, rank, *spec[1:])
            theirs = needed(spec[0], layout, rank, source, *spec[1:])
            if source == rank:
                dkv += found
            else:
                buffer = kv.new_empty(int(mine.sum()), *kv.shape[2:])
                dkv[mine] += exchange(source, found[theirs], peer, buffer)()
        return dquery, dkv, None, None, None, None


def main():
    """Compare three ranks' shards with the library's call on one."""
    from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    branches, length = [(16, 1), (50, 3), (None, 7)], 203
    whole = SequenceLayout.zigzag(length, world_size)
    layout = [whole.positions(i) for i in range(world_size)]
    torch.manual_seed(0)
    query, key, value = (torch.randn(length, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    kv = torch.stack([key, value], 2)
    own = [x[layout[rank]].requires_grad_() for x in (query, kv)]
    out = RingDilatedAttention.apply(*own, branches, layout, rank, True)
    out.sin().sum().backward()
    found = [out.detach(), *(x.grad for x in own)]

    inputs = [x[None].clone().requires_grad_() for x in (query, key, value)]
    expected = dilated_attention(
        *inputs, DilatedPattern(*zip(*branches, strict=True)), is_causal=True
    )
    expected.sin().sum().backward()
    dquery, dkey, dvalue = (x.grad[0] for x in inputs)
    whole_run = [expected.detach()[0], dquery, torch.stack([dkey, dvalue], 2)]
    gaps = [(a - b[layout[rank]]).abs().max() for a, b in zip(found, whole_run, strict=True)]
    print(f"rank {rank}: largest difference from the library {max(gaps):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
