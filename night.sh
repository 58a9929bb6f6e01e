#!/usr/bin/env bash
# Repeat a command until it is done: bash night.sh python train.py config/fast.py
#
# Every launch continues the run. This launches it again five minutes after an error or a crash, and
# gives up after five launches in a row of less than nine minutes, in which no save was due.
trap exit INT TERM # Ctrl-C reaches the run too: wait until it has saved, then exit
short=0
while true; do
    began=$SECONDS
    "$@"
    code=$?
    case $code in
        1 | 134 | 135 | 137 | 139) ;; # an error; a crash of PyTorch or a driver, or lack of memory
        *) exit $code ;;              # 0: done, 128 + N: stopped by signal N
    esac
    ((short = SECONDS - began < 540 ? short + 1 : 0))
    [ $short = 5 ] && exit $code
    echo "night.sh: exit code $code; launching again in five minutes, unless you press Ctrl-C" >&2
    sleep 300
done
