#!/usr/bin/env bash
# Everything worth measuring on one GPU, in parts of under 9 minutes each: the gpu-marked tests; step, sweep and peer; the
# ladder ("all" is these three); and both recipes on data/prose, where the same command goes on until its table is there.
#   bash results/gpu.sh [tests|speed|ladder|all|recipe] [CONFIG] [NANOGPT_CHECKOUT] [FOLDER]
# Writes JSON, PNG and logs to FOLDER (results/<device>). A mode that fails or runs out of its time does not stop the rest.
set -uo pipefail
cd "$(dirname "$0")/.."
part=${1:-all}
config=${2:-config/gpt124m_h200.py}
nanogpt=${3:-../nanoGPT}
device=$(python -c "import torch; print(torch.cuda.get_device_name().removeprefix('NVIDIA ').lower().replace(' ', '_'))") || exit 2
out=${4:-results/$device}
mkdir -p "$out"

run() { # seconds, name, command...
  local limit=$1 name=$2 began=$SECONDS
  shift 2
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s"
  tail -n 15 "$out/$name.log"
}

bench() { # seconds, name, mode, flags...; tokens are made up here, nothing is downloaded
  local limit=$1 name=$2 mode=$3
  shift 3
  run "$limit" "$name" python bench.py "$mode" "$config" --dataset=random "$@" --json="$out/$name.json"
}

if [[ $part == tests || $part == all ]]; then
  run 520 tests python -m pytest -v --tb=short -m gpu tests
fi
if [[ $part == speed || $part == all ]]; then # a quarter of an iteration's tokens, so that the timed windows are short
  bench 110 step step --batch_size=64 --gradient_accumulation_steps=2
  bench 190 sweep sweep --batch_size=64 --gradient_accumulation_steps=2 --batch_sizes=32,64,128 --png="$out/sweep.png"
  if [ -f "$nanogpt/model.py" ]; then
    bench 130 peer peer --batch_size=64 --gradient_accumulation_steps=2 --nanogpt="$nanogpt"
    bench 80 peer_eager peer --batch_size=8 --gradient_accumulation_steps=4 --compile=False --nanogpt="$nanogpt"
  else
    echo "peer: skipped, $nanogpt holds no model.py"
  fi
fi
if [[ $part == ladder || $part == all ]]; then
  bench 530 ladder ladder --batch_size=16 --gradient_accumulation_steps=8 --trials=2 --png="$out/ladder.png"
fi
if [[ $part == recipe ]]; then # 150.7M tokens for the classic at three rates, a quarter of that for the fast recipe
  classic="config/gpt124m_h200.py --dataset=prose --tokens_per_iter=131072 --warmup_iters=100 --max_iters=1150 --eval_interval=115"
  run 530 recipe python results/ablate.py out/recipe --seeds=1 "classic-6=$classic" \
    "classic-12=$classic --learning_rate=1.2e-3" "classic-24=$classic --learning_rate=2.4e-3" \
    "fast=config/fast124m_h200.py --dataset=prose --tokens_per_iter=131072 --max_iters=288 --eval_interval=48"
  [ ! -f out/recipe/ablation.json ] || cp out/recipe/ablation.* "$out"
fi
