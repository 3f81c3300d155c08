#!/bin/sh
# A draft model, an EAGLE-3 head and a block drafter for SmolLM2-135M-Instruct, in the time that there is.
#
#   sh recipes/smollm2/all.sh WORK [MINUTES]
#
# About twenty minutes on one H200, unless MINUTES says otherwise, and some more for what they are worth. WORK gets
# everything: target (fetched unless it is there), text, draft, eagle/head, block/head, a report.json of each, and
# acceptance.json. Text and draft go on where they have stopped.
# PYTHON names another interpreter.
set -eu
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
work=$1 minutes=${2:-20} python=${PYTHON:-python} recipes=$(cd "$(dirname "$0")/.." && pwd)

minutes_of() {
    LC_ALL=C awk "BEGIN { printf \"%.2f\", $minutes * $1 }"
}

seconds_of() {
    LC_ALL=C awk "BEGIN { printf \"%d\", 60 * $minutes * $1 }"
}

# unfinished COMMAND...: what it has got done in its time is enough
unfinished() {
    "$@" || [ $? -eq 75 ]
}

train_head() {
    folder=$1
    shift
    "$python" "$recipes/eagle/train.py" --target "$work/target" --conversations "$work/text" --work "$work/$folder" "$@"
}

[ -d "$work/target" ] || "$python" "$recipes/smollm2/fetch.py" "$work/target"
unfinished "$python" "$recipes/smollm2/train.py" --work "$work" --stages text --sequences 4096 --minutes "$(minutes_of 0.2)"
unfinished "$python" "$recipes/smollm2/train.py" --work "$work" --stages train --minutes "$(minutes_of 0.28)"
"$python" "$recipes/smollm2/train.py" --work "$work" --stages export
train_head eagle --seconds "$(seconds_of 0.22)"
train_head block --block --begin-with "$work/eagle/head" --batch 16 --matrix-lr 0.01 --seconds "$(seconds_of 0.17)"
"$python" "$recipes/smollm2/train.py" --work "$work" --stages report
"$python" "$recipes/smollm2/acceptance.py" --target "$work/target" --draft "$work/draft" --head "$work/eagle/head" \
    --block "$work/block/head" --ngram --output-json "$work/acceptance.json"
