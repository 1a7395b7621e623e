#!/bin/sh
# Region us of the running world, by its topology: deploy/regions/us.sh [options of `skerry deploy`]
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
PATH="$here/.venv/bin:$PATH" exec skerry deploy us "$@"
