#!/bin/sh
# The control plane of the P2P tier against a stock vLLM 0.32.0: connect, ack, lookup, reject, disconnect, each role
# in turn.
#
#   test/interop/p2p-control.sh PYTHON
#
# PYTHON is an interpreter with vllm 0.32.0 (a CPU build will do), nixl, pyzmq, msgspec and numpy. No GPU is needed. It is
# taken from KVFERRY_STOCK_PYTHON if it is not given; without either there is nothing to run.
set -eu
python=${1:-${KVFERRY_STOCK_PYTHON:-}}
if [ -z "$python" ]; then
	echo "skipped: no Python environment with vLLM (see the head of $0)"
	exit 0
fi
case $python in /*) ;; */*) python=$PWD/$python ;; esac
cd "$(dirname "$0")/../.."
UCX_TLS=tcp,sm,self OMP_NUM_THREADS=1 KVFERRY_STOCK_PYTHON=$python \
	go test -count=1 -v -timeout 10m -run TestStockTierLive ./tier/p2p
