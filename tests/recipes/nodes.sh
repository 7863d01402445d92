#!/usr/bin/env bash
# Run a command on node1 of two made-up machines, node1 (10.77.0.1) and node2 (10.77.0.2), joined by a cable.
#
#   unshare --user --map-root-user --net --pid --mount --fork --mount-proc bash nodes.sh PYTHON COMMAND…
#
# Each has its own network, its own processes and its own /tmp/ray, so that Ray takes them for two machines. remote.py
# stands in for their ssh daemons and for Slurm. What is left of both ends with the outer process namespace.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
python=$1
shift
mkdir -p /tmp/ray
nodes=() # first process of each, as the outer namespace counts

ip link add node1 type veth peer name node2
for number in 1 2; do
    # shellcheck disable=SC2016 # bash is the first process of its node: it reaps what Ray leaves behind
    unshare --net --pid --mount --fork --mount-proc \
        bash -c '"$@" & wait' node "$python" "$here/remote.py" serve "10.77.0.$number" &
    outer=$!
    until inner=$(pgrep -P "$outer"); do sleep 0.05; done
    nodes[number]=$inner
    ip link set "node$number" netns "$inner"
    nsenter --target "$inner" --net --pid --mount bash -ec "
        mount -t tmpfs tmpfs /tmp/ray
        ip link set lo up
        ip link set node$number up
        ip address add 10.77.0.$number/24 dev node$number
    "
done
code=0
nsenter --target "${nodes[1]}" --net --pid --mount --wd="$PWD" "$@" || code=$?
left=$(nsenter --target "${nodes[2]}" --pid --mount pgrep -fc 'raylet/raylet|gcs_server' || true)
echo "left on node2: $left"
exit "$code"
