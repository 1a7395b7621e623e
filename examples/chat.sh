#!/bin/sh
# Ask a running world (`make up`) with curl; the answer streams.
#   sh examples/chat.sh 'What is the capital of France? Answer in one sentence.'
# Quotes and backslashes in the question must be JSON-escaped.
set -eu
edge=${EDGE:-http://127.0.0.1:8787}
model=${MODEL:-smollm2}
question=${1:-What is the capital of France? Answer in one sentence.}

curl --fail-with-body -sSN "$edge/v1/chat/completions" \
  -H 'content-type: application/json' -H "authorization: Bearer ${SKERRY_KEY:-none}" \
  -d '{"model": "'"$model"'", "stream": true, "temperature": 0, "max_tokens": 60,
       "messages": [{"role": "user", "content": "'"$question"'"}]}'
