#!/usr/bin/env bash
# One host's part of a run over several hosts. Start it on every host alike, from the root of the clone:
#
#   NODES=2 HEAD=node0 RUN_DIR=runs/multi_node bash examples/multi_node/launch.sh --config examples/multi_node/run.yaml
#
# What follows goes to pretrain_gpt.py, with RUN_DIR as --run-dir and as what the run continues from. Variables:
#   NODES    number of hosts; MIN:MAX with --elastic
#   HEAD     the host where all meet; every host must reach it at PORT (29500)
#   RUN_DIR  on a file system that all hosts share
#   GPUS     processes a host (default: its GPUs)
#   RESTARTS times that the ranks are started over where they are (3)
#   IFNAME   network interface for gloo and NCCL, if they choose the wrong one
#   LOCAL_ADDR  name or address under which other hosts reach this one, if its own name is not known to them
#   RDZV_CONF   torchrun's --rdzv-conf
#   SAVE_SECONDS  for the last checkpoint after a signal (120)
#
# The exit status is the run's own, from RUN_DIR/exit.json: torchrun says 1 to everything. 75: it has saved, start it again.
set -u

: "${NODES:?the number of hosts}" "${HEAD:?the host where all meet}" "${RUN_DIR:?a folder that all hosts share}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$RUN_DIR"
stamp=$(mktemp "$RUN_DIR/.launch-XXXXXX")
trap 'rm -f "$stamp"' EXIT

if [ -n "${IFNAME:-}" ]; then
    export GLOO_SOCKET_IFNAME=$IFNAME NCCL_SOCKET_IFNAME=$IFNAME
fi
# torchrun knows that it is the head's by the host's name alone; an address, or a second name, is looked up here.
address=$(getent hosts "$HEAD" | cut -d ' ' -f 1)
case " localhost 127.0.0.1 ::1 $(hostname) $(hostname -I) " in
*" $HEAD "* | *" ${address:-$HEAD} "*) RDZV_CONF="is_host=1${RDZV_CONF:+,$RDZV_CONF}" ;;
esac
# With torchrun's own store a host that comes back would not be told where the ranks meet (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun kills ranks that have not ended so long after a signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_SECONDS:-120}

torchrun --nnodes "$NODES" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${RUN_ID:-megalite}" \
    ${RDZV_CONF:+--rdzv-conf "$RDZV_CONF"} ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    "$root/pretrain_gpt.py" "$@" --run-dir "$RUN_DIR" --load "$RUN_DIR/checkpoints" --fresh-if-missing &
run=$!
# Slurm, Kubernetes and others tell the shell; torchrun hands SIGTERM on to the ranks, which save and end.
trap 'trap : TERM USR1; kill -TERM "$run"' TERM USR1
trap : INT # torchrun has it from the terminal

while wait "$run"; status=$?; kill -0 "$run" 2>/dev/null; do :; done # a signal ends `wait` before its time

if [ "$RUN_DIR/exit.json" -nt "$stamp" ]; then
    said=$(sed -n 's/.*"exit_code": *\([0-9][0-9]*\).*/\1/p' "$RUN_DIR/exit.json")
    status=${said:-$status}
fi
exit "$status"
