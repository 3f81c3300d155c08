#!/bin/sh
# A draft model, an EAGLE-3 head and a block drafter for SmolLM2-135M-Instruct, in the time that there is.
#
#   sh recipes/smollm2/all.sh WORK [MINUTES]
#
# About twenty minutes, unless MINUTES says otherwise, and some more for what they are worth. With several GPUs all of
# them write the text; then draft and block drafter are trained on the first, and the head on the second. WORK gets
# everything: target (fetched unless it is there), text, draft, eagle/head, block/head, a report.json of each, and
# acceptance.json. Text and draft go on where they have stopped.
# PYTHON names another interpreter, and CUDA_VISIBLE_DEVICES picks GPUs.
set -eu
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
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
cards=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -s -d , -)}
gpus=$(echo "$cards" | tr , ' ' | wc -w)
[ "$gpus" -gt 0 ] || gpus=1
writers='' draft=''

# Background jobs outlive a script that is interrupted or fails.
stop_jobs() {
    for job in $writers $draft; do
        # shellcheck disable=SC2046  # one each
        kill "$job" $(pgrep -P "$job") 2> /dev/null || :
    done
}
trap stop_jobs EXIT
trap 'exit 130' INT TERM

# on_gpu NUMBER COMMAND...
on_gpu() {
    if [ "$gpus" -gt 1 ]; then
        CUDA_VISIBLE_DEVICES=$(echo "$cards" | cut -d , -f $(($1 + 1)))
        export CUDA_VISIBLE_DEVICES
    fi
    shift
    "$@"
}

# write_text MINUTES: every GPU writes its part
write_text() {
    for gpu in $(seq 0 $((gpus - 1))); do
        on_gpu "$gpu" unfinished "$python" "$recipes/smollm2/train.py" --work "$work" --stages text --sequences 4096 \
            --part "$gpu" "$gpus" --minutes "$1" & writers="$writers $!"
    done
    for writer in $writers; do wait "$writer"; done
    writers=
}

# train_draft MINUTES
train_draft() {
    "$python" "$recipes/smollm2/train.py" --work "$work" --stages train export report --train-minutes "$1"
}

# train_eagle SHARE: of the time
train_eagle() {
    train_head eagle --feed-forward 4096 --seconds "$(seconds_of "$1")"
}

# train_block SHARE: it begins with what the head has learned by then, and waits until that is something
train_block() {
    until [ -e "$work/eagle/head/config.json" ]; do sleep 1; done
    train_head block --block --feed-forward 4096 --begin-with "$work/eagle/head" --batch 16 --matrix-lr 0.01 --seconds "$(seconds_of "$1")"
}

train_draft_and_block() {
    train_draft "$(minutes_of 0.45)"
    train_block 0.33
}

if [ "$gpus" -gt 1 ]; then
    write_text "$(minutes_of 0.18)"
    rm -rf "$work/eagle/head"
    on_gpu 0 train_draft_and_block & draft=$!
    (on_gpu 1 train_eagle 0.8)
    wait $draft
else
    write_text "$(minutes_of 0.2)"
    train_draft "$(minutes_of 0.25)"
    train_eagle 0.3
    train_block 0.15
fi
"$python" "$recipes/smollm2/acceptance.py" --target "$work/target" --draft "$work/draft" --head "$work/eagle/head" \
    --block "$work/block/head" --ngram --output-json "$work/acceptance.json"
