#!/bin/sh
# Load from AIPerf: 20 chats, four at a time. Needs: pip install aiperf==0.13.0
#
# sh examples/clients/aiperf.sh URL TOKENIZER
set -eu
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
aiperf profile --model target --url "$1" --endpoint-type chat --streaming \
    --tokenizer "${2:?a tokenizer: a folder, or a name on the Hub}" --request-count 20 --concurrency 4 \
    --synthetic-input-tokens-mean 64 --output-tokens-mean 32 --extra-inputs ignore_eos:true --use-server-token-count \
    --output-artifact-dir "$folder" --ui-type none
