#!/usr/bin/env bash
# The rows of benchmarks/results/many_gpus.md and long_sequences.md, on the CUDA devices of one host.
# Needs the extra fa4; tests and faults also the group test and pytest-xdist.
#
#   benchmarks/several_gpus.sh OUT GPUS [STEP...]     makes OUT/<step>.log and what the step writes
#
# All steps are run, or those that are named. A step that fails does not stop the next.
set -uo pipefail
steps=(attention exchanges longest llama decode tests faults fuzz)
out=${1:?usage: several_gpus.sh OUT GPUS [STEP...]} gpus=${2:?how many GPUs}
shift 2
here=$(dirname "$0")
python=${PYTHON:-python3}
mkdir -p "$out"

ranks() { "$python" -m torch.distributed.run --nproc-per-node "$gpus" "$@"; }
row() { # name, options of rda bench
  "$python" -m ring_dilated_attention.cli bench --device cuda --ranks "1,$gpus" --repeats 5 \
    --head-dim 128 --dtype bfloat16 --json "$out/$1.json" "${@:2}"
}
attention() {
  local crossing=(--segment-lengths 2048,16K,128K,all --dilation-rates 1,8,64,512)
  row longnet --pattern longnet --seq-len 1M &&
    row crossing "${crossing[@]}" --seq-len 1M &&
    row crossing_causal "${crossing[@]}" --seq-len 1M --causal &&
    row short --segment-lengths 2048,4096 --dilation-rates 1,2 --seq-len 4K,16K,64K,256K &&
    row dense --pattern dense --causal --seq-len 64K,256K --baseline context_parallel
}
exchanges() { # the second process has the whole memory
  ranks "$here/eight_gpus.py" --out "$out/exchanges.json" &&
    ranks "$here/eight_gpus.py" --rows tokens --out "$out/tokens.json"
}
longest() { # a training step of as many bytes as fit; file 38 is held out, by its name
  local length=$((3276800 * gpus)) examples="$here/../examples" file
  mkdir -p "$out/bytes"
  for file in 1 38; do base64 -w 0 /dev/urandom | head -c $((length + 2)) >"$out/bytes/$file"; done
  ranks "$examples/train_longnet.py" "@$examples/longnet_base.txt" --data "$out/bytes" \
    --out "$out/longest" --seq-len "$length" --steps 3 --activation-checkpoint-blocks 3
  local status=$?
  rm -r "$out/bytes"
  return $status
}
llama() {
  "$python" "$here/llama_step.py" --out "$out/llama_alone.json" &&
    ranks "$here/llama_step.py" --out "$out/llama.json"
}
decode() { ranks "$here/decode.py" --out "$out/decode.json"; }
tests() { "$python" -m pytest -m gpu "$here/../tests"; }
faults() { # each kind ten times on two GPUs
  local i status=0
  for i in {1..10}; do
    "$python" -m pytest -m "gpu and faults" "$here/../tests/exchange/test_faults.py" || status=1
  done
  return "$status"
}
fuzz() { # a process for each CPU core but one, on the GPUs in turn
  local count=$(($(nproc) - 1)) i status=0 processes=()
  for ((i = 0; i < count; i++)); do
    CUDA_VISIBLE_DEVICES=$((i % gpus)) OMP_NUM_THREADS=1 "$python" "$here/fuzz.py" --device cuda \
      --calls $((2400 / count + 1)) --seed $((700000 + 1000 * i)) --seconds 480 \
      >"$out/fuzz_$i.log" 2>&1 &
    processes+=($!)
  done
  for i in "${processes[@]}"; do wait "$i" || status=1; done
  for ((i = 0; i < count; i++)); do tail -n 1 "$out/fuzz_$i.log"; done
  return $status
}

failed=()
for step in "${@:-${steps[@]}}"; do
  case " ${steps[*]} " in
    *" $step "*) ;;
    *)
      echo "unknown step $step; there are: ${steps[*]}" >&2
      exit 2
      ;;
  esac
  SECONDS=0
  "$step" 2>&1 | tee "$out/$step.log" || failed+=("$step")
  echo "$step: $SECONDS s" | tee -a "$out/$step.log"
done
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
