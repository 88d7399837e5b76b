#!/usr/bin/env bash
# The rows of benchmarks/results/attention_speed.md, on one CUDA device. Needs the extra fa4.
#
#   benchmarks/one_gpu.sh OUT     makes OUT/<row>.json and OUT/<row>.png
set -euo pipefail
out=${1:?usage: one_gpu.sh OUT}
mkdir -p "$out"
row() {
  local name=$1
  shift
  "${PYTHON:-python3}" -m ring_dilated_attention.cli bench --device cuda --out "$out/$name.d" "$@"
  mv "$out/$name.d/results.json" "$out/$name.json"
  mv "$out/$name.d/tflops.png" "$out/$name.png"
  rmdir "$out/$name.d"
}
longnet=(--pattern longnet --heads 12 --dtype bfloat16 --causal --no-causal)
row longnet "${longnet[@]}" --length 262144 --head-dim 128 --head-dim 64 \
  --baseline torchscale --baseline torchscale:cudnn
row longnet_sdpa "${longnet[@]}" --length 262144 --head-dim 128 --head-dim 64 --backend sdpa
row gigapath --pattern gigapath --length 262145 --length 45681 --length 10001 --baseline torchscale
row dense --pattern dense --length 65536 --heads 16 --head-dim 128 --dtype bfloat16 --causal \
  --baseline sdpa:cudnn --baseline flash4
row small "${longnet[@]}" --length 4096 --head-dim 64 --cuda-graph --baseline torchscale
