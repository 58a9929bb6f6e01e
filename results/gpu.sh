#!/usr/bin/env bash
# What a GPU will be asked, in two queues for two rented machines, the most valuable rows first.
#
#   bash results/gpu.sh 1        start queue 1, or go on waiting for it, for at most 9 minutes a call
#   bash results/gpu.sh 2
#   bash results/gpu.sh 1 dry    the same on a CPU with tiny models, in a minute or two
#
# A queue outlives the call that started it. Each call ends with what there is so far in
# ${OUT:-results/<device name>}: rows_N.json, logs_N.tgz, queue_N.log and, of queue 1, three runs'
# metrics.jsonl. After a stop the same call goes on with the rows that are missing; on another
# machine, too, with rows_N.json in gpu_inputs/done/.
#
# | machine, minute | rows | minutes |
# | --- | --- | --- |
# | 1, 0 | machine, and behind it prepare | 1 |
# | 1, 1 | real_shapes, the shipped fast model too | 3.5 |
# | 1, 4.5 | step and fast_step, with profile | 3 |
# | 1, 7.5 | peer, compiled | 2.5 |
# | 1, 10 | before: the classic's stream in float32, the fast one's sines in each layer; fast_no_tables | 4 |
# | 1, 14 | classic, 2.4 epochs of 41M tokens | 5 |
# | 1, 19 | fast and no_tables, 0.8 epochs; compare | 5 |
# | 1, 24 | loss_off, cudnn_off | 3 |
# | 2, 0 | machine, fast_128, other_tests | 8 |
# | 2, 8 | max_autotune, baseline_again | 7 |
# | 2, 15 | peer_eager, ladder | 10 |
#
# BATCH=8 for a card of 12 GB. The default is 32 sequences of 1024.
#
# It needs bash, setsid, tar, timeout, patch or git, and python3 with torch, numpy, tqdm, tiktoken,
# pyarrow and pytest, but no network. The rest travels in gpu_inputs/, which git ignores. To fill it:
#
#   mkdir -p gpu_inputs/nanoGPT gpu_inputs/tiktoken_cache gpu_inputs/done
#   git clone https://github.com/karpathy/nanoGPT ../nanoGPT
#   cp ../nanoGPT/model.py gpu_inputs/nanoGPT/
#   cp prose-train.parquet prose-val.parquet gpu_inputs/     # any English text in a column `text`
#   TIKTOKEN_CACHE_DIR=gpu_inputs/tiktoken_cache \
#       python3 -c 'import tiktoken; tiktoken.get_encoding("gpt2")'
#   pip install --target gpu_inputs/site pytest              # only where the machine has none
set -uo pipefail
cd "$(dirname "$0")/.."

queue=${1:-}
dry=${2:-}
case $queue in
  1 | 2) ;;
  *)
    echo "usage: bash results/gpu.sh 1|2 [dry]" >&2
    exit 2
    ;;
esac

# -----------------------------------------------------------------------------
# What is measured, and where things are

config=config/gpt124m_h200.py
fast_config=config/fast124m_h200.py
if [ "$dry" = dry ]; then
  device=dry_run
  small=(--device=cpu --dtype=auto --compile=False --n_layer=2 --n_head=2 --n_embd=32)
  small+=(--block_size=16)
  fast_small=("${small[@]}" --value_tables=1 --bigram_rows=64)
  batch=4 large=8 eager_batch=2 tokens=128 eager_tokens=64 trials=1 peer_trials=1
  classic_iters=4 fast_iters=4 warmup=1 eval_tokens=128
  texts=(docs/data.md docs/memory.md) tokenizer=byte val_fraction=0.3
  pytest=(python3 -m pytest -q --collect-only)
else
  if ! device=$(python3 -c "import torch; print(torch.cuda.get_device_name())" 2> /dev/null); then
    echo "python3's torch sees no CUDA GPU; without one: bash results/gpu.sh $queue dry" >&2
    exit 2
  fi
  device=$(echo "${device#NVIDIA }" | tr 'A-Z ' 'a-z_')
  small=()
  fast_small=()
  batch=${BATCH:-32} eager_batch=8
  large=$((4 * batch)) tokens=131072 eager_tokens=32768 trials=7 peer_trials=3
  classic_iters=768 fast_iters=256 warmup=100 eval_tokens=1048576
  texts=("${GPU_INPUTS:-gpu_inputs}"/prose-val.parquet "${GPU_INPUTS:-gpu_inputs}"/prose-train.parquet)
  tokenizer=gpt2 val_fraction=0.0111 # as much as prose-val.parquet
  pytest=(python3 -m pytest -v --tb=short -o junit_family=xunit1)
fi
window=(--batch_size="$batch" --tokens_per_iter=$tokens --trials=$trials)

folder() { # make it, and print its absolute path
  mkdir -p "$1" && cd "$1" && pwd
}
inputs=$(folder "${GPU_INPUTS:-gpu_inputs}")
out=$(folder "${OUT:-results/$device}")
work=$(folder "${WORK:-out/gpu}/$queue")
rows=$(folder "$work/rows") # NAME.json, and NAME.unfinished while it runs or where it failed
logs=$(folder "$work/logs")

export PYTHONPATH=$inputs/site${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ -d "$inputs/tiktoken_cache" ]; then
  export TIKTOKEN_CACHE_DIR=$inputs/tiktoken_cache
fi

# -----------------------------------------------------------------------------
# Rows

row() { # the most seconds, name, command...
  local limit=$1 name=$2 began=$SECONDS code
  shift 2
  local json=$rows/$name.json unfinished=$rows/$name.unfinished log=$logs/$name.log
  if [ -s "$json" ] && [ ! -e "$unfinished" ]; then
    echo "$name: measured before"
    return
  fi
  echo '{"exit": null}' > "$unfinished"
  printf '%q ' "$@" > "$log"
  echo >> "$log"
  timeout -k 20 "$limit" "$@" >> "$log" 2>&1
  code=$?
  echo "$name: exit $code after $((SECONDS - began)) s"
  tail -n 15 "$log"
  echo "{\"exit\": $code, \"seconds\": $((SECONDS - began))}" > "$unfinished"
  if ((code == 0)); then # the command's own figures, if it has any
    [ -s "$json" ] && rm "$unfinished" || mv "$unfinished" "$json"
  fi
}

bench() { # the most seconds, name, mode, flags...; on random tokens
  local limit=$1 name=$2 mode=$3
  shift 3
  row "$limit" "$name" python3 bench.py "$mode" "$@" --dataset=random "--json=$rows/$name.json"
}

step() { # the most seconds, name, flags...
  local limit=$1 name=$2
  shift 2
  bench "$limit" "$name" step "$config" "${small[@]}" "${window[@]}" "$@"
}

fast_step() { # the same
  local limit=$1 name=$2
  shift 2
  bench "$limit" "$name" step "$fast_config" "${fast_small[@]}" "${window[@]}" "$@"
}

peer() { # the most seconds, name, micro-batch, tokens an iteration, flags...
  local limit=$1 name=$2 size=$3 tokens=$4
  shift 4
  bench "$limit" "$name" peer "$config" "${small[@]}" --batch_size="$size" \
    --tokens_per_iter="$tokens" --trials=$peer_trials --nanogpt="$inputs/nanoGPT" "$@"
}

train() { # the most seconds, name, config file, iterations, flags...
  local limit=$1 name=$2 file=$3 iters=$4
  shift 4
  row "$limit" "$name" python3 train.py "$file" --dataset="$work/prose" --batch_size="$batch" \
    --tokens_per_iter=$tokens --max_iters="$iters" --eval_interval=$((iters / 4)) \
    --eval_tokens=$eval_tokens --checkpoint_interval="$iters" --keep_checkpoints=1 \
    --sample_tokens=0 --seed=1337 --init_from=auto --out_dir="$work/$name" "$@"
}

tests() { # the most seconds, name, which...
  local limit=$1 name=$2
  shift 2
  row "$limit" "$name" "${pytest[@]}" "--junitxml=$logs/$name.xml" -m gpu "$@"
}

machine() {
  nvidia-smi -q > "$logs/nvidia-smi.log" 2>&1
  row 60 machine python3 - "$rows/machine.json" "$config" "${small[@]}" << 'PYTHON'
import json
import sys
from pathlib import Path

import torch
from torch.utils.benchmark import Timer
import bench
from configurator import load_config
from training import hardware

hw = hardware.set_up(load_config(sys.argv[2:]))
q = torch.zeros(64, 12, 1024, 64, device=hw.device, dtype=hw.dtype)
attention = torch._fused_sdp_choice(q, q, q, is_causal=True)
found = bench.machine(hw)
found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
found["attention"] = torch.nn.attention.SDPBackend(attention).name
if hw.device.type == "cuda":  # as the allocator has understood its variable
    found["allocator"] = torch.cuda.memory._snapshot()["allocator_settings"]
n = 8192 if hw.device.type == "cuda" else 2048
a, b = torch.randn(2, n, n, device=hw.device, dtype=hw.dtype)
timed = Timer("a @ b", globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
found["matmul_tflops"] = 2 * n**3 / timed.blocked_autorange().median / 1e12
Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
print(json.dumps(found, indent=1))
PYTHON
}

as_before() { # the most seconds, function, name: in a copy without what results/gpu.patch takes out
  local copy=$work/before patch=$PWD/results/gpu.patch
  if [ ! -e "$copy/data" ]; then
    mkdir -p "$copy/data"
    cp ./*.py "$copy"
    cp data/*.py "$copy/data"
    cp -r common config reports training "$copy"
    # git apply would look for a repository around the folder
    (cd "$copy" && { patch -p1 -i "$patch" || GIT_CEILING_DIRECTORIES=$work git apply "$patch"; }) \
      || { rm -r "$copy" && echo "$3: $patch does not apply" && return; }
  fi
  (cd "$copy" && "$2" "$1" "$3" --dtype=bfloat16)
}

# -----------------------------------------------------------------------------
first="compiled_bfloat16 or data_parallel"

queue_1() {
  local prepared
  machine
  if [ ! -e "$work/prose" ]; then
    rm -f "$rows/prepare.json" # of another machine
  fi
  row 180 prepare python3 data/prepare_text.py "${texts[@]}" --tokenizer=$tokenizer \
    --val_fraction=$val_fraction --out="$work/prose" &
  prepared=$!
  tests 270 real_shapes -k "$first" tests/test_gpu.py
  step 110 step --profile="$logs/step_trace.json"
  fast_step 110 fast_step --profile="$logs/fast_step_trace.json"
  peer 270 peer "$batch" "$tokens"
  as_before 110 step step_before
  as_before 110 fast_step fast_step_before
  fast_step 110 fast_no_tables --value_tables=0 --bigram_rows=0
  wait "$prepared"
  train 350 classic "$config" $classic_iters "${small[@]}" --learning_rate=1.2e-3 \
    --min_lr=1.2e-4 --warmup_iters=$warmup
  train 200 fast "$fast_config" $fast_iters "${fast_small[@]}"
  train 200 no_tables "$fast_config" $fast_iters "${fast_small[@]}" --value_tables=0 \
    --bigram_rows=0
  row 60 compare python3 compare.py "$work/classic" "$work/fast" "$work/no_tables" \
    "--json=$rows/compare.json"
  step 110 loss_off --loss_chunk=off
  # the compiler's caches do not know of the order of attention kernels
  TORCH_CUDNN_SDPA_DEPRIORITIZED=1 TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 step 110 cudnn_off
}

queue_2() {
  machine
  fast_step 170 fast_128 --batch_size="$large"
  tests 400 other_tests -k "not ($first)" --continue-on-collection-errors tests/test_gpu.py \
    tests/test_model.py tests/test_train.py
  TORCHINDUCTOR_MAX_AUTOTUNE=1 step 300 max_autotune
  step 110 baseline_again
  peer 270 peer_eager "$eager_batch" "$eager_tokens" --compile=False
  bench 350 ladder ladder "$config" "${small[@]}" --batch_size="$batch" \
    --tokens_per_iter=$tokens --trials=1
}

fetch_done() { # rows that an earlier machine has finished
  python3 - "$inputs/done/rows_$queue.json" "$rows" << 'PYTHON'
import json
import sys
from pathlib import Path

done, rows = map(Path, sys.argv[1:])
for name, figures in json.loads(done.read_text()).items() if done.exists() else ():
    if "unfinished" not in figures and not (rows / f"{name}.json").exists():
        (rows / f"{name}.json").write_text(json.dumps(figures))
PYTHON
}

bring_back() {
  local run
  python3 - "$rows" "$out/rows_$queue.json" << 'PYTHON'
import json
import sys
from pathlib import Path

rows, together = Path(sys.argv[1]), {}
for path in sorted(rows.glob("*.json")):
    together[path.stem] = json.loads(path.read_text())
for path in rows.glob("*.unfinished"):
    together[path.stem] = dict(unfinished=json.loads(path.read_text() or "{}"))
Path(sys.argv[2]).write_text(json.dumps(together, indent=1))
PYTHON
  for run in classic fast no_tables; do
    cp "$work/$run/metrics.jsonl" "$out/$run.jsonl" 2> /dev/null
  done
  cp "$work/queue.log" "$out/queue_$queue.log"
  tar -czf "$out/logs_$queue.tgz" -C "$work" logs
}

if [ -n "${IN_QUEUE:-}" ]; then
  fetch_done
  "queue_$queue"
  exit
fi
if ! kill -0 "$(cat "$work/pid" 2> /dev/null)" 2> /dev/null; then
  IN_QUEUE=1 setsid bash results/gpu.sh "$queue" $dry > "$work/queue.log" 2>&1 < /dev/null &
  echo $! > "$work/pid"
fi
while ((SECONDS < ${WAIT:-540})) && kill -0 "$(cat "$work/pid")" 2> /dev/null; do
  sleep 1
done
bring_back
cat "$work/queue.log"
