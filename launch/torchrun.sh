#!/usr/bin/env bash
# Start a run with torchrun: on this node, or (once per node) on several.
#
#   launch/torchrun.sh [--ranks-per-node N] CONFIG [key=value ...]
#   launch/torchrun.sh --nodes 2 --node-rank R --master HOST:PORT [--ranks-per-node N] CONFIG [key=value ...]
#
#   --ranks-per-node N   processes on this node; default: its GPUs (one rank takes one GPU)
#   --nodes N            nodes of the job; default 1
#   --node-rank R        this node's number, 0 to N-1; node 0 hosts the rendezvous
#   --master HOST:PORT   where node 0 is reached; the port has to be free there
#   --logs DIR           also write every rank's output to files below DIR
#   --dry-run            print the command and its environment, start nothing
#
# Exit code: torchrun's own; 2 when the options, the config or the port are refused and nothing was started.
set -euo pipefail

fail() {
  echo "torchrun.sh: $*" >&2
  exit 2
}
number() { [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || fail "$1 $2: expected a whole number"; }

nodes=1 node_rank=0 master='' ranks='' logs='' dry_run=false
while [[ ${1:-} == -* ]]; do
  case $1 in
    --dry-run) dry_run=true; shift; continue ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --nodes | --node-rank | --master | --ranks-per-node | --logs) ;;
    *) fail "unknown option $1; options come before CONFIG, see --help" ;;
  esac
  [[ -n ${2:-} ]] || fail "$1 needs a value"
  case $1 in
    --nodes) number "$1" "$2"; nodes=$2 ;;
    --node-rank) number "$1" "$2"; node_rank=$2 ;;
    --master) master=$2 ;;
    --ranks-per-node) number "$1" "$2"; ranks=$2 ;;
    --logs) logs=$2 ;;
  esac
  shift 2
done
[[ $# -gt 0 ]] || fail "no CONFIG; see --help"
config=$1
shift

# The virtual environment of the working directory, if there is one, so that no activation can be forgotten on a node.
if [[ -x .venv/bin/torchrun ]]; then PATH="$PWD/.venv/bin:$PATH"; fi

[[ -n $ranks ]] || ranks=$(python -c 'from rlhf_megatron.cli import visible_gpus; print(visible_gpus())')
((ranks > 0)) || fail "0 ranks: this node has no GPU that can be seen; say --ranks-per-node N"
((nodes > 0)) || fail "--nodes 0: a job has at least one node"
((node_rank < nodes)) || fail "--node-rank $node_rank: $nodes nodes are numbered 0 to $((nodes - 1))"

# What a former or an outer job left in the environment must not decide where this one meets.
for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT \
  "${!TORCHELASTIC_@}" "${!PET_@}"; do
  if [[ -v $name ]]; then
    echo "torchrun.sh: ignoring $name=${!name} of the environment" >&2
    unset "$name"
  fi
done

settings=(
  # many ranks on a node: the threads of all of them would fight for the cores
  OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  # Megatron overlaps tensor-parallel communication with computation by the order of launches
  CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
  # the last lines before a crash reach the log
  PYTHONUNBUFFERED=1
  # tokenizers must not start threads in processes that fork
  TOKENIZERS_PARALLELISM=false
  # NCCL says why it fails
  NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
)

command=(torchrun --nnodes="$nodes" --nproc-per-node="$ranks")
if ((nodes == 1)); then
  command+=(--standalone) # meets on a free port of this node, so two jobs do not collide
else
  [[ $master =~ ^(.+):([1-9][0-9]*)$ ]] || fail "$nodes nodes need --master HOST:PORT, the same on every node"
  host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
  ((port < 65536)) || fail "--master $master: a port is at most 65535"
  command+=(--node-rank="$node_rank" --master-addr="$host" --master-port="$port")
fi
if [[ -n $logs ]]; then command+=(--log-dir="$logs/node_$node_rank" --tee=3); fi
command+=(-m rlhf_megatron.train "$config" "$@")

if $dry_run; then
  printf '%q ' env "${settings[@]}" "${command[@]}"
  echo
  exit 0
fi

# Refused here, a config costs a second on one process, and is refused once instead of once per rank.
python -m rlhf_megatron.cli check "$config" "$@" \
  --ranks "$((nodes * ranks))" --ranks-per-node "$ranks" >/dev/null || exit "$?"
if ((nodes > 1)); then
  if ((node_rank == 0)); then
    python -c 'import socket, sys; socket.create_server(("", int(sys.argv[1]))).close()' "$port" 2>/dev/null ||
      fail "port $port of $host is in use on this node; end what uses it, or take another --master port on all nodes"
  fi
  echo "torchrun.sh: node $node_rank waits at $master until all $nodes nodes are there, 10 minutes at most"
fi
exec env "${settings[@]}" "${command[@]}"
