#!/bin/sh
# A prompt through the `llm` command, streamed. Needs: pip install llm==0.36
#
# sh examples/clients/llm_prompt.sh [BASE_URL]
set -eu
LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
trap 'rm -r "$LLM_USER_PATH"' EXIT
cat >"$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: outrider
  model_name: target
  api_base: ${1:-http://127.0.0.1:8000/v1}
END
llm --key none --model outrider --option max_tokens 32 --option temperature 0 'def fibonacci(n):'
