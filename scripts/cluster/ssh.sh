#!/usr/bin/env bash
# Start Ray on several machines by ssh, run a command on this one, and end Ray again. docs/guides/multinode.md
#
#   bash scripts/cluster/ssh.sh HOST… -- COMMAND…
#   bash scripts/cluster/ssh.sh node2 node3 node4 -- bash scripts/models/glm-4.5-air.sh
#
# This machine is the head, and one of the nodes. The others are reached by `ssh HOST` without a password, and have this
# folder and its .venv under the same path. COMMAND finds the cluster's address in RAY_ADDRESS, and a token that Ray asks
# for in RAY_AUTH_TOKEN. Ray on a node ends when COMMAND ends, and also when the connection to the node does; no other
# Ray cluster of the machines is touched.
#
#   HEAD_ADDRESS     address of this machine that the nodes reach; default: the first of `hostname -I`
#   PORT             port of Ray's GCS; default 6379
#   FORWARD          names of variables that the nodes get, too: "NCCL_SOCKET_IFNAME NCCL_IB_HCA HF_HOME"
#   RAY_START_FLAGS  more flags of `ray start` on every node: "--num-gpus 8"
#   NODES_TIMEOUT_S  seconds for all nodes to be there; default 120
set -euo pipefail

die() {
    echo "ssh.sh: error: $*" >&2
    exit 2
}

hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
[ "${1:-}" = -- ] || die "give the other hosts, then -- and the command: ssh.sh node2 node3 -- bash scripts/models/…"
shift
[ $# -gt 0 ] || die "no command after --"
twice=$(printf '%s\n' "${hosts[@]}" | sort | uniq -d)
[ -z "$twice" ] || die "host ${twice%%$'\n'*} is given twice: a machine is one node; name each once"

folder=$PWD
venv=${FUSIONRL_VENV:-$folder/.venv}
[ -x "$venv/bin/ray" ] || die "$venv/bin/ray is not there: run this in the repository, after scripts/setup-env.sh"
export PATH="$venv/bin:$PATH"
head=${HEAD_ADDRESS:-$(hostname -I | cut -d' ' -f1)}
export RAY_ADDRESS="$head:${PORT:-6379}"
# Whoever reaches a cluster without a token can run code in it. No command line shows this one: it goes by standard input.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN
export RAY_worker_niceness=${RAY_worker_niceness:-0} # at 15, Ray's default, all else comes first
read -ra start_flags <<<"${RAY_START_FLAGS:-}"

# On each node: variables until the line "go", then Ray until standard input ends, which it does with the connection.
# On one line and without single quotes, for a login shell that is not bash.
# shellcheck disable=SC2016 # the node expands it
on_node='while IFS= read -r line && [ "$line" != go ]; do eval "$line"; done; exec 3<&0; "$@" </dev/null & ray=$!; '
# shellcheck disable=SC2016
on_node+='{ cat <&3 >/dev/null; kill -TERM $ray; } & watch=$!; wait $ray; code=$?; kill $watch; exit $code'

own=$(mktemp -d) # pipes and logs
inputs=()        # our ends of the connections' pipes
pids=()          # of the connections
# shellcheck disable=SC2329 # the trap calls it
end() {
    local code=$? input
    trap - EXIT
    for input in "${inputs[@]}"; do exec {input}>&-; done
    wait "${pids[@]}" 2>/dev/null || true
    rm -rf "$own"
    exit "$code"
}
trap end EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# Run a command without the other ends of the connections, so that these end with this shell, however it ends.
apart() {
    local input
    for input in "${inputs[@]}"; do exec {input}>&-; done
    exec "$@"
}

variables() {
    local name
    for name in PATH RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_worker_niceness ${FORWARD:-}; do
        [ -z "${!name+set}" ] || printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf 'cd %q\ngo\n' "$folder"
}

# node COMMAND…: run the command, which starts a node of Ray, and send it its variables. Node 0 is the head; pipe and log
# are named by the number, as a host may have any name.
node() {
    local number=${#pids[@]} input
    mkfifo "$own/$number.pipe"
    # A terminal's Ctrl-C is for the command alone: Ray has to live until the command has ended.
    (
        trap '' INT
        apart "$@"
    ) <"$own/$number.pipe" >"$own/$number.log" 2>&1 &
    pids+=($!)
    exec {input}>"$own/$number.pipe"
    inputs+=("$input")
    variables >&"$input"
}

echo "ssh.sh: Ray's head is $RAY_ADDRESS"
node bash -c "$on_node" node ray start --head --node-ip-address="$head" --port="${RAY_ADDRESS##*:}" \
    --include-dashboard=false --disable-usage-stats --block "${start_flags[@]}"

count_nodes='
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))
'
# wait_for N: until N nodes are there; the exit status is 2 if one ends first, or if the time is over.
wait_for() {
    local wanted=$1 present=0 number name
    until [ "$present" -ge "$wanted" ]; do
        for number in "${!pids[@]}"; do
            kill -0 "${pids[$number]}" 2>/dev/null && continue
            name="head"
            [ "$number" -eq 0 ] || name=${hosts[$((number - 1))]}
            tail -n 20 "$own/$number.log" >&2
            die "Ray did not start on $name"
        done
        if [ "$SECONDS" -ge "${NODES_TIMEOUT_S:-120}" ]; then
            tail -n 20 "$own"/*.log >&2
            die "$present of $((${#hosts[@]} + 1)) nodes are there after $SECONDS s; above are the ends of their output"
        fi
        present=$(python -c "$count_nodes" "$RAY_ADDRESS" 2>"$own/count.log") || present=0
        [ "$present" -ge "$wanted" ] || sleep 1
    done
}
# Ray on a node ends soon if the head does not answer yet.
wait_for 1
for host in "${hosts[@]}"; do
    words=$(printf ' %q' ray start --address="$RAY_ADDRESS" --disable-usage-stats --block "${start_flags[@]}")
    node ssh -o BatchMode=yes "$host" "bash -c '$on_node' node$words"
done
wanted=$((${#hosts[@]} + 1))
wait_for "$wanted"
echo "ssh.sh: $wanted nodes are there"

# In the background, so that this shell handles a signal at once and passes it on; and in a process group of its own, so
# that it does not receive a terminal's Ctrl-C twice, from there and from here.
set -m
(apart "$@") </dev/null &
command=$!
set +m
trap 'kill -TERM $command' TERM
trap 'kill -INT -- -$command' INT
trap 'kill -HUP -- -$command' HUP
code=0
while :; do
    wait "$command" && code=0 || code=$?
    kill -0 "$command" 2>/dev/null || break # else a signal has ended the wait, and not the command
done
exit "$code"
