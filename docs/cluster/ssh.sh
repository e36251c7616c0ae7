#!/usr/bin/env bash
# Trains on several machines over ssh. From the first of them, in its checkout:
#   docs/cluster/ssh.sh "host1 host2" --preset=speedrun
# GPUS and PORT in the environment set the GPUs of a machine (8) and the port where they meet (29500).
# Each machine has this checkout at the same path, after ./run.sh setup and ./run.sh data …, and opens to ssh
# without a password. host1 is a name under which the others reach it.
set -u
cd "$(dirname "$0")/../.." || exit 1
[ $# -gt 0 ] || { sed -n '2,7s/^# //p' "$0"; exit 2; }
read -ra hosts <<<"$1"
shift

jobs=() failed=0
trap 'kill "${jobs[@]}" 2>/dev/null' EXIT
for node in "${!hosts[@]}"; do
    check=(.venv/bin/python -m tools.run.preflight --ranks="${GPUS:-8}" "$@")
    command=(.venv/bin/python -m torch.distributed.run --nnodes="${#hosts[@]}" --node-rank="$node"
        --nproc_per_node="${GPUS:-8}" --master-addr="${hosts[0]}" --master-port="${PORT:-29500}" train_gpt.py "$@")
    # -tt: the machine's processes end with this ssh, so Ctrl-C here stops all of them
    ssh -tt "${hosts[node]}" "cd $(printf %q "$PWD") && $(printf '%q ' "${check[@]}") && exec $(printf '%q ' \
        "${command[@]}")" </dev/null > >(sed "s/^/${hosts[node]}: /") &
    jobs+=($!)
done
for _ in "${jobs[@]}"; do
    wait -n || { failed=1; break; }     # a machine that fails or refuses ends the others: see the trap
done
exit $failed
