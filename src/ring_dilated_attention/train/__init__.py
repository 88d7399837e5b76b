"""Training of the byte-level language model: `rda train` and `rda sample`.

`command` is what the CLI calls. `config` (options), `data` (bytes and windows), `comm` (ranks and
collectives), `loop` (the training loop), `checkpoint`, `log` (JSONL), `plot` (PNG), `report` (what
the user sees), `signals` (stopping), `launch` (local ranks), `errors`, `sample` (continuing a
prompt).
"""
