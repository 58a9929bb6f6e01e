#!/usr/bin/env bash
# Train until the run is done, whatever ends the process: bash night.sh config/fast.py --hours=8
#
# The same command continues a run. This repeats it after a crash or an error that may pass, at most
# twelve times an hour.
cd "$(dirname "$0")" && PATH=$PWD/.venv/bin:$PATH
trap exit INT # Ctrl-C ends the run, which saves, and then this script
while true; do
    python train.py "$@"
    code=$?
    case $code in
        1 | 134 | 135 | 137 | 139) ;; # an error that may pass; PyTorch, a driver or the memory
        *) exit $code ;;              # 0: done, 2: it would come again, 128 + N: stopped by signal N
    esac
    echo "night.sh: exit code $code; again in five minutes, unless you press Ctrl-C" >&2
    sleep 300
done
