#!/bin/sh
# Region eu of the running world, by its topology: deploy/regions/eu.sh [options of `skerry deploy`]
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
PATH="$here/.venv/bin:$PATH" exec skerry deploy eu "$@"
