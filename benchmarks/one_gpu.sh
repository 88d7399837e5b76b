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
  rm -f "$out/$name.d/results.json" "$out/$name.d/tflops.png" # of a row that was cut short
  "${PYTHON:-python3}" -m ring_dilated_attention.cli bench --device cuda --out "$out/$name.d" "$@"
  mv "$out/$name.d/results.json" "$out/$name.json"
  mv "$out/$name.d/tflops.png" "$out/$name.png"
  rmdir "$out/$name.d"
}
longnet=(--pattern longnet --num-heads 12 --dtype bf16)
for mask in causal no-causal; do
  row "longnet_$mask" "${longnet[@]}" --$mask --seq-len 256K --head-dim 128,64 \
    --baseline torchscale,torchscale:cudnn
  row "longnet_sdpa_$mask" "${longnet[@]}" --$mask --seq-len 256K --head-dim 128,64 --backend sdpa
  row "small_$mask" "${longnet[@]}" --$mask --seq-len 4K --head-dim 64 --cuda-graph \
    --baseline torchscale
done
row gigapath --pattern gigapath --seq-len 262145,45681,10001 --baseline torchscale
row dense --pattern dense --seq-len 64K --num-heads 16 --head-dim 128 --dtype bf16 --causal \
  --baseline sdpa:cudnn,flash4
