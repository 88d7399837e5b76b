"""Documents of length 0, and cu_seqlens padded at the end, in every entry."""

import pytest
import torch

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
    dilated_attention,
    reference_attention,
    replicated_query_attention,
)
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import LongNet, LongNetConfig

PATTERN, LENGTH, PLAIN = DilatedPattern([4, None], [1, 2]), 9, [0, 5, 9]


def tensors():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, LENGTH, 2, 8, generator=generator, dtype=torch.float64).unbind(0)


@pytest.mark.parametrize("documents", [[0, 5, 5, 9], [0, 0, 5, 9], [0, 5, 9, 9, 9]])
def test_they_are_left_out(documents):
    query, key, value = tensors()
    given = torch.tensor(documents, dtype=torch.int32)

    def attend(documents, lengths=None):
        return dilated_attention(query, key, value, PATTERN, documents=documents, lengths=lengths)

    want = attend(PLAIN)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    last = range(LENGTH - 1, LENGTH)
    for found in (
        attend(documents),
        attend(given),
        attend(documents, lengths=[LENGTH] * 2),
        compiled(given),
        compiled(documents),
        reference_attention(query, key, value, PATTERN, documents=documents)[0],
    ):
        torch.testing.assert_close(found, want)
    found = replicated_query_attention(
        query[:, last], key, value, PATTERN, last, documents=documents
    )
    torch.testing.assert_close(found, want[:, last])


def test_on_ranks_in_a_model_and_in_a_cache():
    documents, layout = [0, 5, 5, 9, 9], SequenceLayout.zigzag(LENGTH, 3)
    whole = tensors()
    query, key, value = whole
    want = dilated_attention(query, key, value, PATTERN, documents=PLAIN)

    def one(ends):
        query, key, value = (layout.shard(x, ends.rank, dim=1) for x in whole)
        return dilated_attention(
            query, key, value, PATTERN, documents=documents, group=ends, layout=layout
        )

    torch.testing.assert_close(layout.unshard(run_loopback(3, one), dim=1), want)
    config = LongNetConfig(
        segment_lengths=[4], dilation_rates=[1], num_layers=1, embed_dim=16, num_heads=2, ffn_dim=32
    )
    model, tokens = LongNet(config), torch.randint(config.vocab_size, (1, LENGTH))
    assert torch.equal(model(tokens, documents=documents), model(tokens, documents=PLAIN))
    caches = [DilatedKVCache(PATTERN, 2, 2, 8, max_length=20, dtype=torch.float64) for _ in "ab"]
    for cache, borders in zip(caches, (documents, PLAIN), strict=True):
        cache.prefill(*whole[1:], documents=borders)
    query, key, value = (x[:, -1:] for x in whole)
    outs = [cached_attention(query, key, value, cache) for cache in caches]
    assert torch.equal(*outs)
