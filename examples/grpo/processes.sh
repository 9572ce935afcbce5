# shellcheck shell=bash
# Sourced by grpo_trainer.sh: who has the box, what the launcher runs, and how that ends (docs/ascend.md, Stopping).

# What runs now, in words; the processes of training, Ray and log; a file that says that a conversion is whole, while it is not.
doing='the arguments are read' train='' ray='' log='' half='' scratch='' logs='' facts='' lock='' hurry=false
parents=() sessions=() alive=() started=()
OTHERS_END=10  # seconds from being asked to being killed; the training has STOP_TIMEOUT

# Run a command in a session of its own and wait for it; $1 says what goes on then. A Ctrl-C goes to this script's session, so that what
# runs learns of it here only, once, as a TERM: of which Python says nothing.
attend() {
    doing=$1
    setsid "${@:2}" &
    wait $!
}

# Parent and session of each process that is not a zombie (a container without an init keeps its zombies). Read here, and not by ps and
# pgrep: a second Ctrl-C would end those, and what they did not find would be taken for gone.
scan() {
    local file stat fields
    parents=() sessions=()
    for file in /proc/[0-9]*/stat; do
        { read -r stat < "$file"; } 2> /dev/null || continue
        read -ra fields <<< "${stat##*) }"  # state, parent, group, session
        [[ ${fields[0]} == Z ]] || parents[${stat%% *}]=${fields[1]} sessions[${stat%% *}]=${fields[3]}
    done
}

# What of session $1 and of the processes $2 ... lives, into `alive`.
lives() {
    local each
    scan
    alive=()
    for each in "${!sessions[@]}"; do
        [[ ${sessions[each]} != "$1" && " ${*:2} " != *" $each "* ]] || alive+=("$each")
    done
    ((${#alive[@]}))
}

# Ray's folder on a node that is not the head's: Ray makes it, with the name that the head's has there.
find_logs() {
    local each
    lives "$ray" || return 0
    for each in "${alive[@]}"; do
        logs=$(tr '\0' '\n' 2> /dev/null < "/proc/$each/cmdline" | sed -n 's/^--temp_dir=//p') || logs=''  # it has just ended
        [[ $logs != /tmp/qerl-ray.* ]] || return 0
    done
    logs=''
}

# Add to `started` what process $1 started: what the preflight asks has sessions of its own.
descendants() {
    local each
    for each in "${!parents[@]}"; do
        [[ ${parents[each]} != "$1" ]] || { started+=("$each"); descendants "$each"; }
    done
}

# Ask process $1 to end, and those of $4 ...; kill them and session $1 after $2 seconds or at a second Ctrl-C. $3: its name.
end_session() {
    local until=$((SECONDS + $2)) why=''
    kill -TERM "$1" "${@:4}" 2> /dev/null
    while lives "$1" "${@:4}"; do
        if [[ -z $why ]] && { $hurry || ((SECONDS > until)); }; then
            why="after $2 s" until=$((SECONDS + 5))
            ! $hurry || why='at the second Ctrl-C'
            printf '%s\n' "launch: $3 has not ended: killed $why" >&2
            disown "$1" 2> /dev/null || true  # else bash says that it was killed, with a line of ours
            kill -KILL "${alive[@]}" 2> /dev/null
        elif [[ -n $why ]] && ((SECONDS > until)); then
            printf '%s\n' "launch: $3 (process ${alive[*]}) hangs in the driver and cannot be killed; it keeps the box: npu-smi info" >&2
            return
        fi
        sleep 0.1
    done
    wait "$1" 2> /dev/null  # it has ended; until then it is a zombie
    hurry=false  # what comes next has its own time
}

# The first signal: one line, and the end. $1: its name, $2: the exit status.
interrupted() {
    local limit=$OTHERS_END
    trap 'hurry=true' INT
    trap '' TERM HUP
    [[ -z $train ]] || limit=$STOP_TIMEOUT
    # the terminal may have gone
    printf '%s\n' "launch: $1 while $doing: waiting for it to end, at most $limit s; a second Ctrl-C kills it" >&2 || true
    exit "$2"
}

# Whatever ends this script: the training is told, and writes down why it stopped; then the Ray that was started here is stopped. `ray stop`
# would stop every Ray of this user. What else runs has been started here too.
stop() {
    local status=$?
    trap 'hurry=true' INT
    trap '' TERM HUP
    set +eu  # nothing cuts this short: a process of `parents` that has gone when its turn comes is unset there
    local each
    scan
    for each in "${!parents[@]}"; do
        [[ ${parents[each]} == "$$" && " $train $ray $log " != *" $each "* ]] || continue
        started=()
        descendants "$each"
        end_session "$each" "$OTHERS_END" 'what ran' ${started[@]+"${started[@]}"}
    done
    [[ -z $train ]] || end_session "$train" "$STOP_TIMEOUT" 'the training'
    if [[ -n $log ]]; then  # ends with the training's output; something else may still hold that
        for _ in {1..50}; do
            lives "$log" "$log" || break
            sleep 0.1
        done
        kill -KILL "$log" 2> /dev/null
    fi
    if [[ -n $ray ]]; then
        show kill "$ray"
        end_session "$ray" "$OTHERS_END" Ray
    fi
    rm -f ${facts:+"$facts"} ${half:+"$half"}
    ((status == 0)) || how_to_go_on >&2
    if ((status)) && [[ -n $ray ]]; then
        printf '%s\n' "launch: Ray's logs are left in $scratch${logs:+ and $logs}" >&2
    elif [[ -d $scratch ]]; then
        rm -rf "$scratch" ${logs:+"$logs"}
    fi
    exit "$status"
}

how_to_go_on() {
    local run last
    [[ -n $scratch && -f $scratch/run ]] || return
    run=$(< "$scratch/run")
    last=$(compgen -G "$run/checkpoints/iter_*" | grep -E 'iter_[0-9]+$' | sort | tail -n 1)
    if [[ -n $last ]]; then
        printf '%s\n' "launch: to go on after $(basename "$last"), the last checkpoint: the same command with run.resume=${run@Q}"
    else
        printf '%s\n' "launch: $run has no checkpoint yet (megatron_training.save_interval): the same command starts anew"
    fi
}

# ------------------------------------------------------------------------------------------------------------------------------- the box

# Two runs on the same dies spoil each other, and no port keeps them apart. So a launcher holds a lock on one file of the machine; what it
# starts inherits that, so that the lock lasts as long as any of them: a launcher that was killed leaves it with its Ray.
# $1: --exclusive, or --shared by those who join a Ray, which shares its NPUs out.
own_box() {
    [[ -n $BOX_LOCK ]] || return 0
    if [[ ! -e $BOX_LOCK ]]; then  # for every user to lock and to write, but not with O_CREAT: see fs.protected_regular in proc_sys_fs(5)
        (umask 0 && set -C && : > "$BOX_LOCK") 2> /dev/null || [[ -e $BOX_LOCK ]] || fail "BOX_LOCK=$BOX_LOCK cannot be made: name a file \
that can, on a disk that all who use these NPUs see; empty for no lock" 2
    fi
    { exec {lock}< "$BOX_LOCK"; } 2> /dev/null || fail "BOX_LOCK=$BOX_LOCK cannot be read: chmod a+rw $(printf %q "$BOX_LOCK"), or name another file" 2
    if ! flock --nonblock "$1" "$lock"; then
        ((BOX_WAIT)) || fail "$(holder)"
        printf '%s\n' "launch: $(holder). Waiting, at most $BOX_WAIT s"
        attend 'another run has the box' flock --timeout "$BOX_WAIT" "$1" "$lock" || fail "after $BOX_WAIT s: $(holder)"
    fi
    sign_box ''
}

# Write down who has the box; $1: the run directory, once it is known.
sign_box() {
    local who
    who=$(id -un 2> /dev/null || id -u)
    printf '%s\n' "process $$ of $who on ${HOSTNAME:-this machine}, since $since, config $CONFIG${1:+, run directory $1}" |
        dd of="$BOX_LOCK" conv=nocreat status=none 2> /dev/null || true
}
since=$(date '+%F %T')

holder() {
    local who each left=''
    who=$(< "$BOX_LOCK")
    if [[ $who =~ ^process\ ([0-9]+) && -e /proc/${BASH_REMATCH[1]} ]]; then
        printf '%s' "this box is taken ($BOX_LOCK): $who. Two runs would train on the same dies, whatever RAY_PORT is. Stop that one \
(kill ${BASH_REMATCH[1]}), or wait for it with BOX_WAIT=SECONDS"
        return
    fi
    scan
    for each in $(find /proc/[0-9]*/fd -lname "$BOX_LOCK" 2> /dev/null | cut -d / -f 3 | sort -u); do
        each=${sessions[each]-${sessions[$$]}}
        [[ $each == "${sessions[$$]}" || "$left " == *" $each "* ]] || left+=" $each"
    done
    printf '%s' "this box is taken ($BOX_LOCK): its launcher has gone (${who:-it left no name}), and what it started still runs. "
    printf '%s' "If that is nobody's any more: kill${left:- what its user, or its container, has left}"
}
