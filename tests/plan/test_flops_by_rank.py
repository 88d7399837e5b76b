"""Operations of every rank, counted without a plan of each, and how evenly they are dealt."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import layouts, patterns

from ring_dilated_attention import plan_attention
from ring_dilated_attention.plan import costs


@settings(max_examples=200)
@given(patterns(), layouts(max_length=150), st.booleans(), st.integers(1, 5), st.data())
def test_flops_by_rank_are_those_of_the_plan(pattern, layout, is_causal, heads, data):
    borders = data.draw(st.sets(st.integers(1, layout.length)))
    plan = plan_attention(
        pattern,
        layout,
        is_causal=is_causal,
        num_heads=2 * heads,
        num_kv_heads=heads,
        documents=sorted({0, layout.length, *borders}),
    )
    size = costs.TensorSize(batch=2, head_dim=3, element_size=4)
    work = costs.flops_by_rank(plan, size)
    assert work == [costs.flops(plan.rank(rank), size) for rank in range(layout.world_size)]
    found = costs.balance(work)
    assert 1 <= found.imbalance <= layout.world_size
    assert work[found.largest_rank] == max(work)
