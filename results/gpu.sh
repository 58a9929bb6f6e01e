#!/usr/bin/env bash
# What a GPU will be asked, in parts of at most 9 minutes, the most valuable first.
#
#   bash results/gpu.sh correct     the machine, and the tests that need a GPU
#   bash results/gpu.sh speed       step and peer at several micro-batches, and the fast model
#   bash results/gpu.sh knobs       torch's own switches, and a bfloat16 residual stream
#   bash results/gpu.sh recipe      classic on 0.1B tokens of English prose, both fast editions on a third
#   bash results/gpu.sh eager       against nanoGPT without torch.compile
#   bash results/gpu.sh ladder      what each optimisation is worth
#   bash results/gpu.sh PART dry    the same on a CPU with a tiny model, in seconds
#
# BATCH=8 bash results/gpu.sh ...   for a card of 12 GB. The default is 32 sequences of 1024.
#
# Each row writes NAME.json to ${OUT:-results/<device name>} when it has been measured. A row that
# fails or is stopped leaves NAME_unfinished.json. All logs are in PART.tgz, written after each row.
# The same command goes on with the rows that are missing. On a fresh machine it finds the finished
# rows in gpu_inputs/done/.
#
# It needs bash, tar, timeout, patch or git, and python3 with torch, numpy, tqdm, tiktoken, pyarrow
# and pytest, but no network. The rest travels in gpu_inputs/, which git ignores. To fill it:
#
#   mkdir -p gpu_inputs/nanoGPT gpu_inputs/tiktoken_cache gpu_inputs/done
#   git clone https://github.com/karpathy/nanoGPT ../nanoGPT
#   cp ../nanoGPT/model.py gpu_inputs/nanoGPT/
#   cp prose-train.parquet prose-val.parquet gpu_inputs/     # any English text in a column `text`
#   TIKTOKEN_CACHE_DIR=gpu_inputs/tiktoken_cache \
#       python3 -c 'import tiktoken; tiktoken.get_encoding("gpt2")'
#   pip install --target gpu_inputs/site pytest              # only where the machine has none
#   cp results/<device name>/*.json gpu_inputs/done/         # only to go on with a part
set -uo pipefail
cd "$(dirname "$0")/.."

part=${1:-}
dry=${2:-}
case $part in
  correct | speed | knobs | recipe | eager | ladder) ;;
  *)
    echo "usage: bash results/gpu.sh correct|speed|knobs|recipe|eager|ladder [dry]" >&2
    exit 2
    ;;
esac

# -----------------------------------------------------------------------------
# What is measured, and where things are

config=config/gpt124m_h200.py
fast_config=config/fast124m_h200.py
if [ "$dry" = dry ]; then
  device=dry_run
  small=(--device=cpu --dtype=auto --compile=False --n_layer=1 --n_head=2 --n_embd=32)
  small+=(--block_size=16)
  fast_small=("${small[@]}" --value_tables=0)
  batch=4 batches=4 eager_batch=2 ladder_batch=4
  tokens=128 eager_tokens=64
  trials=1 ladder_rows=2
  classic_iters=4 fast_iters=4 warmup=1 eval_tokens=128
  texts=(docs/data.md docs/memory.md) tokenizer=byte val_fraction=0.3
  pytest=(python3 -m pytest -q --collect-only)
else
  if ! device=$(python3 -c "import torch; print(torch.cuda.get_device_name())" 2> /dev/null); then
    echo "python3's torch sees no CUDA GPU; without one: bash results/gpu.sh $part dry" >&2
    exit 2
  fi
  device=$(echo "${device#NVIDIA }" | tr 'A-Z ' 'a-z_')
  small=()
  fast_small=()
  batch=${BATCH:-32} batches="$batch $((2 * batch)) $((batch / 2))" eager_batch=8
  ladder_batch=$((batch / 2))
  tokens=131072 eager_tokens=32768
  trials=3 ladder_rows=9
  classic_iters=768 fast_iters=256 warmup=100 eval_tokens=1048576
  texts=("${GPU_INPUTS:-gpu_inputs}"/prose-val.parquet "${GPU_INPUTS:-gpu_inputs}"/prose-train.parquet)
  tokenizer=gpt2 val_fraction=0.0111 # as much as prose-val.parquet
  pytest=(python3 -m pytest -v --tb=short -o junit_family=xunit1)
fi

folder() { # make it, and print its absolute path
  mkdir -p "$1" && cd "$1" && pwd
}
inputs=$(folder "${GPU_INPUTS:-gpu_inputs}")
out=$(folder "${OUT:-results/$device}")
work=$(folder "${WORK:-out/gpu}")
logs=$(folder "$work/$part")

export PYTHONPATH=$inputs/site${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ -d "$inputs/tiktoken_cache" ]; then
  export TIKTOKEN_CACHE_DIR=$inputs/tiktoken_cache
fi

# -----------------------------------------------------------------------------
# Rows

PART_SECONDS=540

row() { # the most seconds, name, command...
  local limit=$1 name=$2 began=$SECONDS left=$((PART_SECONDS - SECONDS)) code
  shift 2
  local json=$out/$name.json unfinished=$out/${name}_unfinished.json log=$logs/$name.log
  if [ ! -e "$json" ] && [ ! -e "$unfinished" ]; then # an earlier call's, on another machine
    cp "$inputs/done/$name.json" "$inputs/done/${name}_unfinished.json" "$out" 2> /dev/null
  fi
  if [ -s "$json" ] && [ ! -e "$unfinished" ]; then
    echo "$name: measured before"
    return
  fi
  if ((limit > left)); then
    limit=$left
  fi
  if ((limit < 20)); then
    echo "$name: no time left; the same command goes on here"
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
  if ((code == 0)) && [ -s "$json" ]; then # the command's own figures
    rm "$unfinished"
  elif ((code == 0)); then
    mv "$unfinished" "$json"
  fi
  rm -f "$logs/$name.json" "$logs/${name}_unfinished.json"
  cp "$json" "$unfinished" "$logs" 2> /dev/null
  tar -czf "$work/$part.tgz" -C "$work" "$part"
  mv "$work/$part.tgz" "$out/$part.tgz"
}

bench() { # the most seconds, name, mode, flags...; on random tokens
  local limit=$1 name=$2 mode=$3
  shift 3
  row "$limit" "$name" python3 bench.py "$mode" "$@" --dataset=random "--json=$out/$name.json"
}

step() { # the most seconds, name, micro-batch, flags...
  local limit=$1 name=$2 size=$3
  shift 3
  bench "$limit" "$name" step "$config" "${small[@]}" --batch_size="$size" \
    --tokens_per_iter=$tokens --trials=$trials "$@"
}

peer() { # the most seconds, name, micro-batch, tokens an iteration, flags...
  local limit=$1 name=$2 size=$3 tokens=$4
  shift 4
  bench "$limit" "$name" peer "$config" "${small[@]}" --batch_size="$size" \
    --tokens_per_iter="$tokens" --trials=$trials --nanogpt="$inputs/nanoGPT" "$@"
}

# -----------------------------------------------------------------------------
# Parts

correct() {
  nvidia-smi -q > "$logs/nvidia-smi.log" 2>&1
  row 60 machine python3 - "$out/machine.json" "$config" "${small[@]}" << 'PYTHON'
import json
import os
import sys
from pathlib import Path

import torch
from benchmarks import measure, modes
from configurator import load_config
from training import hardware

hw = hardware.set_up(load_config(sys.argv[2:]))
q = torch.zeros(64, 12, 1024, 64, device=hw.device, dtype=hw.dtype)
attention = torch._fused_sdp_choice(q, q, q, is_causal=True)
found = measure.machine(hw)
found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
found["attention"] = torch.nn.attention.SDPBackend(attention).name
names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
found["allocator"] = {name: os.environ.get(name) for name in names}
found["matmul_tflops"] = modes.matmul_tflops(hw)
Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
print(json.dumps(found, indent=1))
PYTHON
  local first="compiled_bfloat16 or data_parallel"
  row 270 real_shapes "${pytest[@]}" "--junitxml=$logs/real_shapes.xml" -m gpu -k "$first" \
    tests/test_gpu.py
  row 500 other_tests "${pytest[@]}" "--junitxml=$logs/other_tests.xml" -m gpu -k "not ($first)" \
    --continue-on-collection-errors tests/test_gpu.py tests/test_model.py tests/test_train.py
}

speed() {
  local size
  for size in $batches; do
    step 110 "step_$size" "$size" --profile="$logs/step_${size}_trace.json"
  done
  if [ "$dry" != dry ]; then # the part eager tries it
    peer 150 peer "$batch" "$tokens"
  fi
  bench 110 fast_step step "$fast_config" "${fast_small[@]}" --batch_size="$batch" \
    --tokens_per_iter=$tokens --trials=$trials
}

knobs() {
  step 100 baseline "$batch"
  copy_with_patch "$work/bf16_stream" && (
    cd "$work/bf16_stream" || exit
    step 100 bf16_stream "$batch" --dtype=bfloat16
  )
  step 100 loss_chunk "$batch" --loss_chunk=$((tokens / 16))
  if [ "$dry" = dry ]; then # the others differ in a variable alone
    return
  fi
  TORCH_CUDNN_SDPA_DEPRIORITIZED=1 step 90 cudnn_deprioritized "$batch"
  TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 step 120 coordinate_descent "$batch"
  TORCH_BLAS_PREFER_CUBLASLT=1 step 90 cublaslt "$batch"
  # leaves 60 seconds for the last row, which compiles nothing anew
  TORCHINDUCTOR_MAX_AUTOTUNE=1 step $((PART_SECONDS - SECONDS - 60)) max_autotune "$batch"
  step 60 baseline_again "$batch"
}

copy_with_patch() { # folder: the program there, its residual stream in bfloat16
  rm -rf "$1"
  mkdir -p "$1/data"
  cp ./*.py "$1"
  cp data/*.py "$1/data"
  cp -r benchmarks common config reports training "$1"
  # git would look for the patch's files in the repository around the folder
  if ! (cd "$1" && patch -p1) < results/bf16_stream.patch; then
    (cd "$1" && GIT_CEILING_DIRECTORIES=$work git apply) < results/bf16_stream.patch
  fi
  if cmp -s model.py "$1/model.py"; then
    echo "bf16_stream: results/bf16_stream.patch does not apply to model.py" >&2
    return 1
  fi
}

recipe() {
  rm -f "$out/prepare.json" # the dataset may be gone; where it is there, this takes a second
  row 120 prepare python3 data/prepare_text.py "${texts[@]}" --tokenizer=$tokenizer \
    --val_fraction=$val_fraction --out="$work/prose"
  train 350 classic "$config" $classic_iters --learning_rate=1.2e-3 --min_lr=1.2e-4 \
    --warmup_iters=$warmup
  train 350 fast "$fast_config" $fast_iters "${fast_small[@]}"
  train 350 first_edition "$fast_config" $fast_iters --value_tables=0 --bigram_rows=0 \
    --head_lr=0.004
  row 60 compare python3 compare.py "$work/classic" "$work/fast" "$work/first_edition" \
    "--json=$out/compare.json"
}

train() { # the most seconds, name, config file, iterations, flags...
  local limit=$1 name=$2 file=$3 iters=$4
  shift 4
  row "$limit" "$name" python3 train.py "$file" "${small[@]}" --dataset="$work/prose" \
    --batch_size="$batch" --tokens_per_iter=$tokens --max_iters="$iters" \
    --eval_interval=$((iters / 4)) --eval_tokens=$eval_tokens --checkpoint_interval="$iters" \
    --keep_checkpoints=1 --sample_tokens=0 --seed=1337 --init_from=auto --out_dir="$work/$name" "$@"
  cp "$work/$name/metrics.jsonl" "$out/$name.jsonl" # also of a run that was stopped
}

eager() {
  peer 300 peer_eager "$eager_batch" "$eager_tokens" --compile=False
}

ladder() { # its first column; a row that is in the JSON already is not measured again
  local code
  # not on python3's standard input: the processes that measure could not import it
  code=$(
    cat << 'PYTHON'
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import attempt
from benchmarks.modes import LADDER, speed_text
from configurator import load_config

path, config = Path(sys.argv[1]), load_config(sys.argv[3:])
rows = json.loads(path.read_text())["rows"] if path.exists() else []
amp_dtype, arguments = config.dtype, dict(trials=2)
for number, (name, changes, more_arguments) in enumerate(LADDER[: int(sys.argv[2])]):
    config = replace(config, **changes)
    if name == "AMP":
        config = replace(config, dtype=amp_dtype)
    arguments |= more_arguments
    if number < len(rows):
        continue
    result = attempt(config, **arguments)
    rows.append(dict(name=name, first=result))
    path.write_text(json.dumps(dict(rows=rows), indent=1))
    print(name, speed_text(result) if result["tokens_per_sec"] else "out of memory")
PYTHON
  )
  row "$PART_SECONDS" ladder python3 -c "$code" "$out/ladder.json" $ladder_rows "$config" \
    "${small[@]}" --dataset=random --batch_size="$ladder_batch" --tokens_per_iter=$tokens
}

"$part"
