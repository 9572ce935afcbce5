# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # variables of processes.sh and facts.py
# Sourced by grpo_trainer.sh: what nodes do for each other (docs/ascend.md, Several nodes).

# Node 0 starts its Ray after its preflight and its conversions; `ray start` would give up before.
wait_for_head() {
    local until=$((SECONDS + NODE_TIMEOUT))
    listens "$MASTER_ADDR" "$RAY_PORT" && return
    say "no Ray at $MASTER_ADDR:$RAY_PORT yet: node 0 starts it after its preflight and conversions. Waiting, at most $NODE_TIMEOUT s"
    doing="node 0's Ray is waited for"
    until listens "$MASTER_ADDR" "$RAY_PORT"; do
        ((SECONDS < until)) || fail "after $NODE_TIMEOUT s nobody answers at $MASTER_ADDR:$RAY_PORT: look at what node 0's launcher says. If it \
waits for this node: MASTER_ADDR is its NODE_ADDR, RAY_PORT the same on all, and no firewall is between them"
        sleep 1
    done
}

# Until node 0's Ray has gone, which this one would try to reach for a minute. A port that refuses has no Ray any more; a network that
# does not answer may come back.
serve() {
    local last=$SECONDS refused=0 said began=$SECONDS named=''
    doing='this node serves node 0'
    say "node $NODE_RANK serves node 0 until that one stops; Ray's output is in $scratch/ray.log"
    while ((refused < 2)); do
        sleep 2 &
        wait $! || true
        [[ -n $logs ]] || find_logs
        if ((began && SECONDS - began > 20)); then
            began=0
            grep -q 'runtime started' "$scratch/ray.log" || say "this node's Ray has not joined that of $MASTER_ADDR:$RAY_PORT after 20 s, \
though that one answers: both need the same token (sha256sum $(printf %q "$RAY_AUTH_TOKEN_PATH"), on both) and the same version of Ray"
        fi
        if ! kill -0 "$ray" 2> /dev/null; then
            cat "$scratch/ray.log" >&2
            fail "this node's Ray has ended. Its output is above. Node 0's launcher says whether it could reach NODE_ADDR=$NODE_ADDR"
        fi
        # shellcheck disable=SC2016  # for that shell
        if said=$(LC_ALL=C timeout 5 bash -c 'exec 3<> "/dev/tcp/$0/$1"' "$MASTER_ADDR" "$RAY_PORT" 2>&1); then
            [[ -z $named ]] || say "node 0 at $MASTER_ADDR answers again"
            last=$SECONDS refused=0 named=''
        elif [[ $said == *refused* ]]; then
            ((refused += 1))
        elif ((SECONDS - last > 60)); then
            fail "node 0 at $MASTER_ADDR cannot be reached for 60 s: its launcher ends the training. Look at the network between them"
        elif [[ -z $named ]] && ((SECONDS - last > 15)); then
            named=true
            say "node 0 at $MASTER_ADDR cannot be reached since $((SECONDS - last)) s. After 60 s this node ends"
        fi
    done
    say "node 0's Ray at $MASTER_ADDR has gone, and this node is done. How the training went is in node 0's run directory; if its launcher \
says nothing, node 0 is lost"
    disown "$ray"
    while lives "$ray"; do
        kill -KILL "${alive[@]}" 2> /dev/null || true
        sleep 0.1
    done
    ray=''
    exit 0
}

name_lost_node() {
    say "the training has failed; whether a node was lost is known in at most 25 s"
    sleep 25 &
    wait -n "$watch" $! || true
}

# On node 0: wait for the training, or for a node to go, which the training may not notice: then it is told to end. Its exit status.
attend_nodes() {
    local watch status=0
    setsid "$PYTHON" examples/grpo/wait_for_npus.py --watch --nodes "$nodes" --npus "$npus" --ray-process "$ray" 2> "$scratch/watch.log" &
    watch=$!
    wait -n "$train" "$watch" || status=$?
    if ! kill -0 "$train" 2> /dev/null; then
        # a call to a lost node fails a quarter of a minute before Ray takes the node for lost
        ((status == 0)) || name_lost_node
        return "$status"
    fi
    ((status != 4)) || exit 1  # it has said why
    printf '%s\n' "launch: the nodes are watched no longer ($(tail -n 1 "$scratch/watch.log"), status $status): when one goes, the training may \
wait for it. The training goes on" >&2
    wait "$train"
}
