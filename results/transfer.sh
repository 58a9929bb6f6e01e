#!/usr/bin/env bash
# Does what the fast recipe saves last as models and runs grow? A ladder of model sizes, each
# trained for several lengths with each recipe: docs/fast_recipe.md.
#
#   bash results/transfer.sh OUT 4x128 [5x192] [6x256]
#
# It makes OUT/data once: the sources of packages that torch brings along, or TEXT="FILE...", of
# which 4x128 wants 25 MB at least to read nothing twice, and 80 MB for its 262,144 tokens of
# validation, which are 1.1 %. Paths are relative to the repository. At the end
# `python -m benchmarks.transfer OUT` makes a table, OUT/transfer.json and OUT/transfer.png. Each study is a folder, OUT/SIZE-TOKENS, with TOKENS tokens for each
# parameter of the layers' matrices, made by benchmarks/ablate.py with SEEDS seeds (default: 1).
# PIECES=1 also trains, at 1 and 2 tokens, what shows the worth of each group of pieces: about a
# third longer. Give it each time: a study reports what the last command named.
# The same command goes on where it was stopped. Rungs may run side by side: each takes one thread.
#
# | rung | matrices | estimated minutes of one thread of an EPYC for a seed, in bfloat16 |
# | --- | --- | --- |
# | 4x128 | 0.79M | 40 |
# | 5x192 | 2.2M | 130 |
# | 6x256 | 4.7M | 130 |
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
rungs=" 4x128 5x192 6x256 "
[ $# -gt 1 ] || { echo "give OUT and one or more of:$rungs" >&2 && exit 2; }
out=$1
shift
for rung in "$@"; do
    [[ $rungs = *" $rung "* ]] || { echo "$rung: give OUT and one or more of:$rungs" >&2 && exit 2; }
done
if [ ! -e "$out/data/manifest.json" ]; then
    site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # shellcheck disable=SC2086
    python data/prepare_text.py ${TEXT:-$site/networkx $site/sympy $site/torch} \
        --tokenizer=bpe:8192 --val_fraction=0.011 --out="$out/data"
elif [ -n "${TEXT:-}" ]; then
    echo "$out/data is there already; for another TEXT give another OUT"
fi

gpt="config/gpt124m_4070.py"
fast="config/fast124m_4070.py"

size_of() {  # the batch grows with the model, so that the number of iterations hardly does
    case $1 in
    4x128) size="--n_layer=4 --n_head=2 --n_embd=128 --batch_size=12 --tokens_per_iter=3072"
        iterations=256 tables=1 ;;  # of a token for each parameter; 3 tables for 12 layers
    5x192) size="--n_layer=5 --n_head=3 --n_embd=192 --batch_size=32 --tokens_per_iter=8192"
        iterations=270 tables=1 ;;
    6x256) size="--n_layer=6 --n_head=4 --n_embd=256 --batch_size=64 --tokens_per_iter=16384"
        iterations=288 tables=2 ;;
    esac
}

study() {  # TOKENS NAME=FLAGS...
    local tokens=$1 steps given=()
    steps=$(awk "BEGIN { print int($1 * $iterations) }")
    shift
    for recipe in "$@"; do
        given+=("$recipe $size --max_iters=$steps --eval_interval=$((steps / 2)) --block_size=256 \
--eval_tokens=262144 --checkpoint_interval=128 --log_interval=32 --sample_tokens=0 --dtype=auto \
--dataset=$out/data")
    done
    python -m benchmarks.ablate "$out/$rung-$tokens" --seeds="${SEEDS:-1}" "${given[@]}"
}

for rung in "$@"; do
    size_of "$rung"
    # rates and warm-up: the best of five to sixteen trials for each recipe (results/LOG.md)
    rates="--learning_rate=0.0125 --head_lr=0.016"
    classic="classic=$gpt --learning_rate=0.006 --min_lr=0.0006 --beta2=0.99 --warmup_iters=128"
    muon="muon=$gpt --optimizer=muon --learning_rate=0.0125 --min_lr=0.00125 --warmup_iters=19"
    whole="fast=$fast $rates --value_tables=$tables"
    bare="no_tables=$fast $rates --value_tables=0 --bigram_rows=0"
    no_values="no_values=$fast $rates --value_tables=0"
    no_pairs="no_pairs=$fast $rates --value_tables=$tables --bigram_rows=0"
    recipes=("$whole" "$bare" ${PIECES:+"$muon" "$no_values" "$no_pairs"})
    # the fast ones' shorter runs reach the losses of the classic's longer ones
    study 0.25 "$whole" "$bare"
    study 0.5 "$whole" "$bare"
    study 1 "${recipes[@]}"
    if [ "$rung" = 6x256 ]; then
        study 2 "$classic" "$bare"
        study 4 "$classic"
        continue
    fi
    study 2 "$classic" "${recipes[@]}"
    study 4 "$classic" "$bare"
    study 8 "$classic"
done
python -m benchmarks.transfer "$out"
