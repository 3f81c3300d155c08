#!/bin/sh
# A draft model, an EAGLE-3 head and a block drafter for SmolLM2-135M-Instruct, in the time that there is.
#
#   sh recipes/smollm2/all.sh WORK [MINUTES]
#
# About twenty minutes on one H200, unless MINUTES says otherwise. WORK gets everything: target (fetched unless it is
# there), text, draft, eagle/head, block/head, and a report.json of each. Text and draft go on where they have stopped.
# PYTHON names another interpreter.
set -eu
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
work=$1 minutes=${2:-20} python=${PYTHON:-python} recipes=$(cd "$(dirname "$0")/.." && pwd)

# of SHARE UNIT: so much of the time, in units of so many minutes
of() { awk "BEGIN { printf \"%.2f\", $minutes * $1 / $2 }"; }

# unfinished COMMAND...: what it has got done in its time is enough
unfinished() {
    "$@" || [ $? -eq 1 ]
}

head() {
    folder=$1
    shift
    "$python" "$recipes/eagle/train.py" --target "$work/target" --conversations "$work/text" --work "$work/$folder" "$@"
}

[ -d "$work/target" ] || "$python" "$recipes/smollm2/fetch.py" "$work/target"
unfinished "$python" "$recipes/smollm2/train.py" --work "$work" --stages text --sequences 4096 --minutes "$(of 0.2 1)"
unfinished "$python" "$recipes/smollm2/train.py" --work "$work" --stages train --minutes "$(of 0.28 1)"
"$python" "$recipes/smollm2/train.py" --work "$work" --stages export
head eagle --seconds "$(of 0.22 0.016667)"
head block --block --begin-with "$work/eagle/head" --batch 16 --matrix-lr 0.01 --seconds "$(of 0.17 0.016667)"
"$python" "$recipes/smollm2/train.py" --work "$work" --stages report
