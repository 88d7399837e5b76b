"""The options of training that no other command has.

They are None unless given, so that resuming can keep the run's values. What the help shows as their
defaults are those of `TrainConfig`, which a test compares.
"""

from __future__ import annotations

from typing import Any

from . import options
from .option import (
    Argument,
    Flag,
    Option,
    Reader,
    integer,
    number,
    number_from_0,
    one_of,
    path,
    path_text,
    text,
)

PRESETS = ("small", "longnet-base")
CHECKPOINTS = ("none", "full", "keep_attention")


def by_preset(option: Option, small: object) -> Option:
    """A shared option whose default is the preset's; `small` is that of the preset ``small``."""
    return option.but(shown=f"{options.THE_PRESET_S} (small: {small})")


def run_s(option: Option) -> Option:
    """A shared option that is None unless given, with the same default."""
    return option.but(shown=option.shown or str(option.default))


def _integer(name: str, panel: str, default: object, help_text: str, **about: Any) -> Option:
    read = integer(about.pop("low", 1))
    return _option(name, panel, default, help_text, read=read, metavar="N", toml=(int,), **about)


def _number(name: str, panel: str, default: object, help_text: str, **about: Any) -> Option:
    return _option(
        name, panel, default, help_text, read=number, metavar="X", toml=(int, float), **about
    )


def _option(
    name: str,
    panel: str,
    default: object,
    help_text: str,
    *,
    read: Reader,
    preset: bool = False,
    **about: Any,
) -> Option:
    """An option with its default; `preset`: whether presets other than ``small`` change it."""
    option = Option(name=name, panel=panel, help=help_text, shown=str(default), read=read, **about)
    return by_preset(option, default) if preset else option


RESUME = Flag(
    name="resume",
    panel=options.OUTPUT,
    help="Go on from the newest checkpoint of --out (without --out, of the newest run). Options "
    "not given keep the run's values; the number of ranks may differ.",
)
RESTARTABLE = Flag(
    name="restartable",
    panel=options.OUTPUT,
    help="Go on from the newest checkpoint of --out if there is one, else begin: for torchrun's "
    "restarts, and for jobs that are queued again.",
)
PRESET = Option(
    name="preset",
    panel=options.MODEL,
    metavar="NAME",
    help="Values of options that are not given: small, or longnet-base (12 layers of width 768 on "
    "sequences of millions of bytes, for GPUs).",
    read=one_of(PRESETS),
    shown=PRESETS[0],
    choices=PRESETS,
)
NUM_LAYERS = _integer("num-layers", options.MODEL, 3, "Blocks of the model.", preset=True)
EMBED_DIM = _integer("embed-dim", options.MODEL, 128, "Width of the model.", preset=True)
FFN_DIM = _integer("ffn-dim", options.MODEL, 512, "Width of the MLP.", preset=True)
ROPE_THETA = _number("rope-theta", options.MODEL, 10_000, "Base of the rotary wavelengths.")

DATA = _option(
    "data",
    options.DATA,
    "the standard library's sources",
    "Text file or folder; may be repeated.",
    read=path_text,
    metavar="PATH",
    is_repeated=True,
)
TOKENIZER = _option(
    "tokenizer",
    options.DATA,
    "bytes",
    "bytes, or a tokenizer.json of a byte-level tokenizer (Hugging Face).",
    read=path_text,
    metavar="FILE",
)
TRAIN_TOKENIZER = _integer(
    "train-tokenizer",
    options.DATA,
    "none",
    "Train a tokenizer of this many tokens on the training text, and use it.",
)
INIT_FROM = _option(
    "init-from",
    options.MODEL,
    "random weights",
    "Begin a new run with the weights of a run, of a checkpoint, or of rda export; the model and "
    "the tokenizer are theirs. The pattern, --seq-len and --rope-theta may differ.",
    read=path_text,
    metavar="FOLDER",
)
HELDOUT_FRACTION = _number(
    "heldout-fraction", options.DATA, 0.05, "Fraction of the text that is held out of training."
)
EVAL_EVERY = _integer(
    "eval-every", options.DATA, 50, "Steps between held-out evaluations.", preset=True
)
EVAL_WINDOWS = _integer(
    "eval-windows", options.DATA, 16, "Held-out sequences per evaluation.", preset=True
)

STEPS = _integer(
    "steps", options.OPTIMISATION, 350, "Step at which the run is complete.", preset=True
)
LEARNING_RATE = _number(
    "learning-rate", options.OPTIMISATION, 0.006, "Peak learning rate.", preset=True
)
FINAL_LEARNING_RATE = _number(
    "final-learning-rate", options.OPTIMISATION, 0.1, "Final learning rate / peak (cosine)."
)
WARMUP_STEPS = _integer(
    "warmup-steps", options.OPTIMISATION, 20, "Steps of linear warm-up.", low=0, preset=True
)
WEIGHT_DECAY = _number(
    "weight-decay", options.OPTIMISATION, 0.1, "AdamW's weight decay, of matrices only."
)
BETA1 = _number("beta1", options.OPTIMISATION, 0.9, "AdamW's beta1.")
BETA2 = _number("beta2", options.OPTIMISATION, 0.95, "AdamW's beta2.")
MAX_GRAD_NORM = _number(
    "max-grad-norm", options.OPTIMISATION, 1.0, "Gradients of a larger norm are scaled down to it."
)

SEQUENCE_RANKS = _integer(
    "sequence-ranks", options.RANKS_, "all", "Ranks that share a sequence; must divide --ranks."
)
ACTIVATION_CHECKPOINT = _option(
    "activation-checkpoint",
    options.MEMORY,
    "none",
    "What backward recomputes: none, full or keep_attention (all but attention).",
    read=one_of(CHECKPOINTS),
    preset=True,
    metavar="NAME",
    choices=CHECKPOINTS,
)
ACTIVATION_CHECKPOINT_BLOCKS = _integer(
    "activation-checkpoint-blocks",
    options.MEMORY,
    1,
    "With keep_attention: store the input of every Nth block only.",
)
CHUNK_ROWS = _integer(
    "chunk-rows",
    options.MEMORY,
    "all",
    "Compute MLP, projections and loss this many rows at a time, which bounds their memory.",
    preset=True,
)
SAVE_EVERY = _integer("save-every", options.OUTPUT, 100, "Steps between checkpoints.", preset=True)
KEEP = _integer("keep", options.OUTPUT, 3, "Newest checkpoints to keep.", preset=True)

TENSORBOARD = Flag(
    name="tensorboard",
    panel=options.OUTPUT,
    help="Write the log as events of TensorBoard too.",
    default=None,
    has_no=True,
)

PROMPT = Option(
    name="prompt",
    panel=options.SAMPLING,
    metavar="TEXT",
    help="Text to continue.",
    read=text,
    is_required=True,
)
CHECKPOINT = Option(
    name="checkpoint",
    panel=options.SAMPLING,
    metavar="FOLDER",
    help="A checkpoint, a run, whose newest checkpoint is taken, or a folder of rda export.",
    read=path,
    shown="the newest run in runs",
)
RUN = Argument(
    name="run",
    panel="Arguments",
    metavar="RUN",
    help="A run, whose newest checkpoint is taken, or a checkpoint.",
    read=path,
)
TO = Option(
    name="to",
    panel=options.OUTPUT,
    metavar="FOLDER",
    help="Folder to write to, new or empty.",
    read=path,
    is_required=True,
)
MAX_NEW_TOKENS = Option(
    name="max-new-tokens",
    panel=options.SAMPLING,
    metavar="N",
    help="How many tokens to add (of a model of bytes: bytes). A text may become longer than those "
    "of the training: nothing is cut off, and the model meets positions it was not trained on.",
    read=integer(1),
    default=200,
    toml=(int,),
)
TEMPERATURE = Option(
    name="temperature",
    panel=options.SAMPLING,
    metavar="X",
    help="Logits are divided by it; 0: always the most likely token.",
    read=number_from_0,
    default=0.8,
    toml=(int, float),
)
TOP_K = Option(
    name="top-k",
    panel=options.SAMPLING,
    metavar="N",
    help="Draw among this many most likely tokens only.",
    read=integer(1),
    shown="all",
    toml=(int,),
)
TOP_P = Option(
    name="top-p",
    panel=options.SAMPLING,
    metavar="X",
    help="Draw among the fewest most likely tokens whose probabilities add up to X, in (0, 1].",
    read=number,
    shown="all",
    toml=(int, float),
)
