#!/usr/bin/env bash
# The rows of benchmarks/results/many_gpus.md and long_sequences.md, on the CUDA devices of one host.
# Needs the extra fa4; the tests also the group test and pytest-xdist.
#
#   benchmarks/several_gpus.sh OUT GPUS [STEP...]     makes OUT/<step>.log and what the step writes
#
# All steps are run, or those that are named. A step that fails does not stop the next.
set -uo pipefail
steps=(tables tokens slides documents calls tests train longest rounds host power without_exchange hosts)
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
calls() { # compiling every kernel takes longer than a test may
  "$python" -m pytest -m gpu "$here/../tests/test_gpu_ranks.py" -k two_hundred -s --timeout 600
}
tests() { "$python" -m pytest -m gpu -n 8 --dist loadgroup -k "not two_hundred" "$here/../tests"; }
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
hosts() { ranks "$here/hosts.py" --out "$out/hosts.json"; } # told to be on two
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
