#!/usr/bin/env bash
# Everything worth measuring on one GPU, in under 9 minutes: the gpu-marked tests, then step, sweep, peer and ladder.
#   bash results/gpu.sh [CONFIG] [NANOGPT_CHECKOUT] [FOLDER]
# Writes JSON, PNG and logs to FOLDER (results/<device>). A mode that fails or runs out of its time does not stop the rest.
set -uo pipefail
cd "$(dirname "$0")/.."
config=${1:-config/gpt124m_h200.py}
nanogpt=${2:-../nanoGPT}
device=$(python -c "import torch; print(torch.cuda.get_device_name().removeprefix('NVIDIA ').lower().replace(' ', '_'))") || exit 2
out=${3:-results/$device}
mkdir -p "$out"
flags=(--dataset=random) # tokens made up here: nothing is downloaded

run() { # seconds, name, command...
  local limit=$1 name=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s"
  tail -n 15 "$out/$name.log"
}

# A quarter of an iteration's tokens, so that the timed windows are short
run 80 tests python -m pytest -q -m gpu
run 60 step python bench.py step "$config" "${flags[@]}" --batch_size=64 --gradient_accumulation_steps=2 --json="$out/step.json"
run 110 sweep python bench.py sweep "$config" "${flags[@]}" --batch_size=64 --gradient_accumulation_steps=2 \
  --batch_sizes=32,64,128 --json="$out/sweep.json" --png="$out/sweep.png"
if [ -f "$nanogpt/model.py" ]; then
  run 70 peer python bench.py peer "$config" "${flags[@]}" --batch_size=64 --gradient_accumulation_steps=2 \
    --nanogpt="$nanogpt" --json="$out/peer.json"
  run 50 peer_eager python bench.py peer "$config" "${flags[@]}" --batch_size=8 --gradient_accumulation_steps=4 \
    --compile=False --nanogpt="$nanogpt" --json="$out/peer_eager.json"
fi
run $((530 - SECONDS)) ladder python bench.py ladder "$config" "${flags[@]}" --batch_size=16 --gradient_accumulation_steps=8 \
  --trials=2 --json="$out/ladder.json" --png="$out/ladder.png"
