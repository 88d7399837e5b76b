#!/usr/bin/env bash
# The rows of benchmarks/results/many_gpus.md and long_sequences.md, on the CUDA devices of one host.
# Needs the extra fa4; tests and faults also the group test and pytest-xdist. On two H100 with 32 CPU
# cores tests take 6 minutes, faults 14 (at most 7 for each way), fuzz 10.
#
#   benchmarks/several_gpus.sh OUT GPUS [STEP...]     makes OUT/<step>.log and what the step writes
#
# All steps are run, or those that are named. A step that fails does not stop the next.
set -uo pipefail
steps=(tables tokens slides documents tests faults fuzz train longest rounds host power without_exchange)
out=${1:?usage: several_gpus.sh OUT GPUS [STEP...]} gpus=${2:?how many GPUs}
shift 2
here=$(dirname "$0")
python=${PYTHON:-python3}
mkdir -p "$out"

ranks() { "$python" -m torch.distributed.run --nproc-per-node "$gpus" "$@"; }
rda() { "$python" -m ring_dilated_attention.cli "$@"; }
log2() { awk -v n="$1" 'BEGIN { print int(log(n) / log(2) + 1e-9) }'; }

tables() { "$python" "$here/many_gpus.py" "$out/tables" --gpus "$gpus"; }
tokens() { # as many as fit: 2^28 a GPU forward, half as many forward and backward
  ranks "$here/billion_tokens.py" --log2-length $((28 + $(log2 "$gpus"))) --out "$out/tokens.json" &&
    ranks "$here/billion_tokens.py" --log2-length $((27 + $(log2 "$gpus"))) --backward \
      --out "$out/tokens_backward.json"
}
slides() {
  "$python" "$here/slide_encoder.py" --tiles 45680 --tiles 100000 --out "$out/slides.json" &&
    ranks "$here/slide_encoder.py" --tiles 1048576 --cases checkpointed --samples 3 \
      --out "$out/slides_sharded.json"
}
documents() { "$python" "$here/documents.py" --out "$out/documents.json"; }
tests() { # faults and ranks a few at a time, as in the Makefile: faults are to be noticed in time
  local all=$here/../tests status=0 beside=() name process
  export OMP_NUM_THREADS=2
  for name in faults gpu_ranks; do
    "$python" -m pytest -m gpu -n 2 "$all/test_$name.py" >"$out/tests_$name.log" 2>&1 &
    beside+=($!)
  done
  "$python" -m pytest -m gpu -n 16 --dist loadgroup "$all" \
    --ignore "$all/test_faults.py" --ignore "$all/test_gpu_ranks.py" || status=1
  for process in "${beside[@]}"; do wait "$process" || status=1; done
  tail -n 3 "$out"/tests_{faults,gpu_ranks}.log
  return $status
}
faults() { # each kind ten times on two GPUs, by NCCL and by copies
  local status=0 way
  for way in "" --copies; do
    PYTHONPATH=$here/../tests "$python" "$here/../tests/support/faulty_ranks.py" --backend nccl $way \
      --ranks 2 --rounds 10 --jobs 12 --json "$out/faults${way#-}.json" || status=1
  done
  return $status
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
sources() { # the Python sources of all packages that are installed
  local site
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  find -L "$site" -name '*.py' -print0 | sort -z | xargs -0 cat >"$out/sources.txt"
}
train_on() { # bytes a GPU, name, options
  sources && PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True rda train --preset longnet-base \
    --ranks "$gpus" --seq-len $((gpus * $1)) --data "$out/sources.txt" --warmup-steps 2 \
    --out "$out/$2.run" "${@:3}"
  local status=$?
  rm -rf "$out/sources.txt" "$out/$2.run/checkpoints"
  return $status
}
train() { train_on 2097152 train --steps 5; }
longest() { # by the memory of those that fitted; the first may not
  for each in 3473408 3276800; do
    train_on "$each" "longest_$each" --steps 2 --activation-checkpoint-blocks 3 && return
  done
  return 1
}
rounds() { ranks "$here/rounds.py" --out "$out/rounds.json"; } # of heads, of a dense ring
host() { ranks "$here/host_time.py" --out "$out/host_time.json"; }
without_exchange() { # then with zeros, which take less power
  ranks "$here/without_exchange.py" --out "$out/without_exchange.json" &&
    ranks "$here/without_exchange.py" --zeros --out "$out/without_exchange_zeros.json"
}
power() { # then with messages eight times as long, and as rare
  ranks "$here/power.py" --out "$out/power.json" &&
    ranks "$here/power.py" --only ring --pairs $((1 << 36)) --out "$out/power_long_messages.json"
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
