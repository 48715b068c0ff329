#!/bin/sh
# The same checkpoints in a stock vLLM 0.32.0 and in `kvferry engine`, both in float32: equal tokens from equal
# prompts, and from equal texts.
#
#   test/interop/checkpoint.sh PYTHON [-update]
#
# With -update, what the stock engine gives is recorded for the tests of engine/model.
#
# PYTHON is an interpreter with vllm 0.32.0 (a CPU build will do) and what it loads models with: torch, transformers. No
# GPU is needed. It is taken from KVFERRY_STOCK_PYTHON if it is not given; without either there is nothing to run.
set -eu
python=${1:-${KVFERRY_STOCK_PYTHON:-}}
if [ -z "$python" ]; then
	echo "skipped: no Python environment with vLLM (see the head of $0)"
	exit 0
fi
[ $# -eq 0 ] || shift
case $python in /*) ;; */*) python=$PWD/$python ;; esac
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 KVFERRY_STOCK_PYTHON=$python \
	go test -count=1 -v -timeout 10m -run TestStockCheckpointLive ./cmd/kvferry "$@"
