#!/usr/bin/env bash
# The rows of benchmarks/results/attention_speed.md, on one CUDA device. Needs the extra fa4.
#
#   benchmarks/one_gpu.sh OUT     makes OUT/<row>.json and OUT/calls.json
set -euo pipefail
out=${1:?usage: one_gpu.sh OUT}
mkdir -p "$out"
row() {
  local name=$1
  shift
  "${PYTHON:-python3}" -m ring_dilated_attention.cli bench --device cuda \
    --json "$out/$name.json" "$@"
}
for mask in "" --causal; do
  for head_dim in 128 64; do
    row "longnet_$head_dim$mask" --pattern longnet --seq-len 256K --head-dim "$head_dim" $mask \
      --baseline torchscale,kernel
  done
done
row gigapath --pattern gigapath --seq-len 262145,45681,10001 --baseline torchscale
row dense --pattern dense --seq-len 64K --causal --baseline kernel,sdpa
"${PYTHON:-python3}" "$(dirname "$0")/calls.py" --out "$out/calls.json"
