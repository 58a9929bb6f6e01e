#!/usr/bin/env bash
# Repeat a command until it is done, whatever ends it: bash night.sh python train.py config/fast.py
#
# The same command continues a run. This launches it again after a crash or an error that may pass,
# at most twelve times an hour.
trap exit INT # Ctrl-C ends the run, which saves, and then this script
while true; do
    "$@"
    code=$?
    case $code in
        1 | 134 | 135 | 137 | 139) ;; # an error that may pass; PyTorch, a driver or lack of memory
        *) exit $code ;;              # 0: done, 2: it would come again, 128 + N: stopped by signal N
    esac
    echo "night.sh: exit code $code; again in five minutes, unless you press Ctrl-C" >&2
    sleep 300
done
