#!/bin/sh
# A task of lm-eval that compares how likely each answer is. Needs: pip install 'lm_eval[api]==0.4.13'
#
# sh examples/clients/lm_eval.sh [BASE_URL]
set -eu
here=$(dirname "$0")
cd "$here"
lm_eval run --model local-completions --tasks next_line --include_path lm_eval_task \
    --model_args "model=target,base_url=${1:-http://127.0.0.1:8000/v1}/completions,tokenizer_backend=remote,max_length=2048"
