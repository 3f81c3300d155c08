#!/bin/sh
# A completion as it comes, with nothing but curl.
#
# sh examples/clients/curl.sh [BASE_URL]
set -eu
base_url=${1:-http://127.0.0.1:8000/v1}
curl --fail --silent --show-error --no-buffer "$base_url/completions" \
    --header 'Content-Type: application/json' \
    --data '{"model": "target", "prompt": "def fibonacci(n):\n", "max_tokens": 16, "temperature": 0, "stream": true}'
