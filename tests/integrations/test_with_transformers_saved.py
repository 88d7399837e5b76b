"""Saved and loaded by transformers: the pattern comes back, or an error does."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.transformers_models import (
    DENSE,
    FINITE,
    LENGTH,
    PATTERN,
    batch_of,
    check_ranks,
    make,
    prompt,
    ready,
    step,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ring_dilated_attention import DilatedPattern, SequenceLayout
from ring_dilated_attention.integrations.transformers import (
    DilatedCache,
    remove_attention,
    set_attention,
)
from ring_dilated_attention.integrations.transformers_call import SETTINGS

PATTERNS = {
    "mixed": PATTERN,
    "finite": FINITE,
    "blocked": DilatedPattern([8, 30], [2, 3], head_offsets="blocked"),
    "split": DilatedPattern([8, None], [1, 2], head_branches="split"),
    "zero keys": DilatedPattern([8, 16], [1, 4], zero_keys=True),
    "dense": DENSE,
}
NAME = "ring_dilated_attention"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def saved(tmp_path, pattern=PATTERN, **changes):
    """A model, and where it was saved."""
    model = make(**changes)
    set_attention(model, pattern)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def config_of(path):
    return json.loads((Path(path) / "config.json").read_text())


@pytest.mark.parametrize("name", PATTERNS)
def test_every_option_of_a_pattern_comes_back(tmp_path, name):
    model, path = saved(tmp_path, PATTERNS[name])
    loaded = AutoModelForCausalLM.from_pretrained(path)
    batch = batch_of("packed and padded")
    _, loss, gradients = step(model, batch)
    _, got, found = step(loaded, batch)
    assert torch.equal(got, loss)
    assert all(map(torch.equal, found, gradients))
    loaded.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again") == config_of(path)


def test_without_the_head_and_from_a_config(tmp_path):
    model, path = saved(tmp_path)
    ids = prompt()
    want = model.model(ids).last_hidden_state
    base = AutoModel.from_pretrained(path)
    assert torch.equal(base(ids).last_hidden_state, want)
    fresh = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).double()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.model(ids).last_hidden_state, want)


def test_a_restored_model_generates_through_the_dilated_cache(tmp_path):
    model = ready(pattern=FINITE)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False}
    want = model.generate(prompt(), **options)
    out = loaded.generate(prompt(), return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, want)
    assert isinstance(out.past_key_values, DilatedCache)
    assert out.past_key_values.layers[0].kv.keys.shape[1] < len(want[0])


def test_a_restored_model_trains_on_ranks_with_its_own_pattern(tmp_path):
    _, path = saved(tmp_path)
    loaded, batch = AutoModelForCausalLM.from_pretrained(path), batch_of("packed and padded")
    loss = check_ranks(loaded, SequenceLayout.zigzag(LENGTH, 2), batch)
    set_attention(loaded)  # None: the config's pattern
    assert torch.equal(step(loaded, batch)[1], loss)


def test_another_attention_for_a_saved_pattern_is_refused(tmp_path):
    _, path = saved(tmp_path)
    message = r"dilated pattern \(8, 1\).*but attn_implementation is 'sdpa'.*del config"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    config = AutoConfig.from_pretrained(path)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="sdpa")
    config.save_pretrained(tmp_path / "config alone")  # transformers drops the implementation
    with pytest.raises(ValueError, match=message):
        AutoModel.from_config(AutoConfig.from_pretrained(tmp_path / "config alone"))
    del config.ring_dilated_attention  # what the message says
    dense = AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="sdpa")
    assert dense.config._attn_implementation == "sdpa"


NO_LENGTH = {
    **{"segment_lengths": [0], "dilation_rates": [1], "zero_keys": False},
    **{"head_offsets": "interleaved", "head_branches": "all"},
}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "holds no pattern as set_attention writes it: AttributeError"),
        (
            {"pattern": {"segment_lengths": [3]}},
            "holds no pattern .* TypeError: .*'dilation_rates'",
        ),
        ({"pattern": NO_LENGTH}, "holds no pattern .* a segment length must be >= 1"),
    ],
)
def test_a_damaged_entry_is_refused(tmp_path, entry, message):
    _, path = saved(tmp_path)
    text = config_of(path)
    text[NAME] = entry
    (path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("wrap", [dict, lambda entry: {"pattern": entry}])
def test_an_entry_by_hand_has_the_defaults_of_a_pattern(wrap):
    config = make().config
    entry: dict[str, Any] = {"segment_lengths": [8, None], "dilation_rates": [1, 2]}
    setattr(config, NAME, wrap(entry))
    config._attn_implementation = NAME
    model = AutoModelForCausalLM.from_config(config)
    assert getattr(model, SETTINGS).pattern == DilatedPattern(**entry)


WITHOUT_US = """
import ring_dilated_attention
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({path!r})
except ValueError as error:
    print(error)
import ring_dilated_attention.integrations.transformers
print(type(AutoModelForCausalLM.from_pretrained({path!r})).__name__)
"""


def test_where_the_integration_is_not_imported_transformers_refuses(tmp_path):
    _, path = saved(tmp_path)
    code = WITHOUT_US.format(path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f'Specified `attn_implementation="{NAME}"` is not supported' in done.stdout
    assert done.stdout.splitlines()[-1] == "LlamaForCausalLM"
    assert "import ring_dilated_attention.integrations" in config_of(path)[NAME]["load"]


# --- no silent way back to dense


def test_dense_attention_has_to_be_asked_for(tmp_path):
    model = ready()
    options = {"max_new_tokens": 3, "do_sample": False}
    want = model.generate(prompt(), **options)
    with pytest.raises(ValueError, match=r"another function .* remove_attention\(model, dense=Tr"):
        remove_attention(model)
    assert torch.equal(model.generate(prompt(), **options), want)  # nothing was changed
    remove_attention(model, dense=True)
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert not {NAME, "attn_implementation"} & config_of(tmp_path).keys()


def test_models_that_share_a_config_share_its_pattern():
    first = make()
    set_attention(first, PATTERN)
    second = type(first)(first.config).double()
    set_attention(second, FINITE)
    second(prompt())
    with pytest.raises(
        ValueError, match=r"pattern \(8, 1\).* its config now .* that share a config"
    ):
        first(prompt())
    with torch.no_grad(), pytest.raises(ValueError, match="share a config"):
        first(prompt(), use_cache=True)
