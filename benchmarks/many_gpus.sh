#!/usr/bin/env bash
# The rows of benchmarks/results/many_gpus_h200_*.md, on the CUDA devices of one host. Needs the
# extra fa4.
#
#   benchmarks/many_gpus.sh OUT [GPUS]    makes OUT/<row>/ with JSON and plots
#
# A row that fails is named, and the others go on; the exit status then is 1.
set -euo pipefail
out=${1:?usage: many_gpus.sh OUT [GPUS]}
gpus=${2:-4}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=0
attempt() {
  local name=$1
  shift
  "$python" -m "$@" || {
    echo "$name failed"
    failed=1
  }
}
row() {
  local name=$1
  shift
  attempt "$name" ring_dilated_attention.cli bench --device cuda --out "$out/$name" \
    --repeats 5 --seconds 2 "$@"
}
on_all() {
  local name=$1
  shift
  attempt "$name" torch.distributed.run --nproc-per-node "$gpus" "$@"
}
everyone=$(seq -s, 1 "$gpus")
wide=(--dtype bfloat16 --head-dim 128)
row dense --ranks "1,$gpus" --pattern dense --causal --heads 16 "${wide[@]}" --no-errors \
  --length 65536 --length 262144 --peer cp:allgather --peer cp:alltoall --peer ours:messages
row longnet --ranks "$everyone" --pattern longnet --heads 12 "${wide[@]}" --length 1048576
row weak --scaling weak --ranks "$everyone" --pattern longnet --heads 12 "${wide[@]}" \
  --length 262144
row crossing --ranks "1,$gpus" --segment-lengths 2048,16384,131072,all \
  --dilation-rates 1,8,64,512 --heads 12 "${wide[@]}" --length 1048576 --causal --no-causal
sizes=()
for length in 64 512 2048 4096 8192 16384 32768 65536 262144 400000; do
  sizes+=(--length "$length")
done
row earlier --ranks 1,2 --segment-lengths 2048,4096 --dilation-rates 1,2 --heads 12 --head-dim 64 \
  --dtype bfloat16 --dtype float32 "${sizes[@]}"
on_all transports benchmarks/transports.py --out "$out/transports.json"
on_all billion_forward benchmarks/billion_tokens.py --log2-length 30 \
  --out "$out/billion_forward.json"
on_all billion_backward benchmarks/billion_tokens.py --log2-length 29 --backward \
  --out "$out/billion_backward.json"
exit "$failed"
