#!/usr/bin/env bash
# Launches any config for NPUs, on one node or called on each of several: environment, preflight, conversions, Ray, training
# (docs/ascend.md). The named launchers source it with a config of their own.
set -euo pipefail
export PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}  # under env -i it has a value that nobody else sees
export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0  # else, below `uv run`, Ray starts every worker by uv, in a copy of the whole checkout

usage() {
    cat <<EOF
usage: [VARIABLE=value ...] bash $0 [CONFIG] [--dry-run] [key=value ...]

Checks the machine, converts what is missing, starts a Ray of its own, trains, stops that Ray. Exit status: that of the training.

  CONFIG              a config of configs/ (here: ${CONFIG:-none}); --config-name CONFIG and the variable CONFIG do the same
  --dry-run           print every command and run none
  --accept CHECK      this check of the preflight may fail; may be repeated (docs/troubleshooting.md). The run directory keeps it
  key=value           Hydra overrides, as for cli/train_grpo.py; relative paths in them are relative to the repository

Variables (docs/ascend.md has them all): PYTHON, MODELS, DATA, GSM8K, MINDSPEED_LLM, RAY_ADDRESS, RAY_PORT, TRUST_REMOTE_CODE, BOX_WAIT;
several nodes: NNODES, NODE_RANK, NODE_ADDR, MASTER_ADDR, RAY_AUTH_TOKEN_PATH, NODE_TIMEOUT
EOF
}

fail() {
    printf '%s\n' "launch: $1" >&2
    exit "${2:-1}"
}

# + command, as it could be typed; then run, unless --dry-run.
show() {
    local word line='+'
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] && line+=" $word" || line+=" ${word@Q}"
    done
    printf '%s\n' "$line"
}
run() {
    show "$@"
    $dry_run || "$@"
}

# The variable $1 must be a whole number from $2 to $3; $4 is why, or the way out.
check_number() {
    local value=${!1}
    if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((value < $2 || value > $3)); then
        fail "$1=$value must be a whole number from $2 to $3, without leading zeros: $4" 2
    fi
}

run_attended() {  # $1: what goes on then
    show "${@:2}"
    $dry_run || attend "$@"
}

listens() {  # address port
    # shellcheck disable=SC2016  # for that shell
    timeout 5 bash -c 'exec 3<> "/dev/tcp/$0/$1"' "$1" "$2" 2> /dev/null
}

# Take over the environment of a script of somebody else's. A shell of its own sources it: CANN's and NNAL's read variables that are not
# set, and count with `grep | wc` what is not there; they may also exit, change the folder, or use names of ours.
foreign() {
    local line
    show source "$1"
    $dry_run && return
    # shellcheck disable=SC2016  # for that shell; '': NNAL's reads the arguments of whoever sources it
    attend "$1 is sourced" bash -c 'source "$0" "" >&2; env -0 > "$1"' "$1" "$scratch/environment" || true
    [[ -s $scratch/environment ]] ||
        fail "$1 ended the shell that sourced it. Look at what it says; what is sourced already is not sourced here" 2
    while IFS= read -r -d '' line; do
        [[ ! $line =~ ^[A-Za-z][A-Za-z0-9_]*= || $line =~ ^(PWD|OLDPWD|SHLVL)= ]] || export "${line?}"
    done < "$scratch/environment"
    rm "$scratch/environment"
}

# shellcheck source=examples/grpo/processes.sh
source "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
# shellcheck source=examples/grpo/nodes.sh
source "$(dirname "${BASH_SOURCE[0]}")/nodes.sh"
for name in basename cut date dd dirname env find flock grep id mkfifo mktemp realpath rm sed setsid sleep sort tail timeout tr; do
    command -v "$name" > /dev/null || fail "there is no $name on PATH=$PATH: it comes with coreutils, findutils, grep or util-linux" 2
done

# ------------------------------------------------------------------------------------------------------------------------------ arguments

dry_run=false
overrides=() accepted=''
[[ ${1:--} == -* || $1 == *=* ]] || { CONFIG=$1; shift; }
while (($#)); do
    case $1 in
        --help | -h) usage; exit ;;
        --dry-run) dry_run=true ;;
        --config-name=* | -cn=*) CONFIG=${1#*=} ;;
        --config-name | -cn) (($# > 1)) || fail "$1 needs a name" 2; CONFIG=$2; shift ;;
        --accept=*) accepted+=",\"${1#*=}\"" ;;
        --accept) (($# > 1)) || fail "$1 needs the name of a check" 2; accepted+=",\"$2\""; shift ;;
        -*) fail "unknown option $1; --help lists them" 2 ;;
        *=*) overrides+=("$1") ;;
        *) fail "$1 is neither an option nor an override key=value; --help" 2 ;;
    esac
    shift
done
[[ -n ${CONFIG:-} ]] || fail "which config? The first argument names one of configs/, such as grpo_qwen3_30b_a3b_gsm8k_16npu; --help" 2
[[ -z $accepted ]] || overrides+=("run.accepted_checks=[${accepted:1}]")
case ${TRUST_REMOTE_CODE:-false} in
    true) overrides+=(generate_config.trust_remote_code=true) ;;  # the model's own Python runs in vLLM's workers
    false) ;;
    *) fail "TRUST_REMOTE_CODE=$TRUST_REMOTE_CODE must be true or false" 2 ;;
esac

[[ ${RAY_ADDRESS:-} != local ]] || unset RAY_ADDRESS  # a Ray of the run's own, which is started here
NODE_RANK=${NODE_RANK:-0} RAY_PORT=${RAY_PORT:-6380} NODE_TIMEOUT=${NODE_TIMEOUT:-600}
BOX_LOCK=${BOX_LOCK-/tmp/mindspeed_qerl.lock} BOX_WAIT=${BOX_WAIT:-0} STOP_TIMEOUT=${STOP_TIMEOUT:-60}
[[ -z ${NNODES:-} ]] || check_number NNODES 1 9999 "the nodes that share the NPUs; without it, as many as npu.ranks_per_node asks for"
check_number RAY_PORT 1024 65534 "Ray takes it and the next port"
check_number NODE_TIMEOUT 1 999999 "the seconds to wait for all NPUs"
check_number BOX_WAIT 0 999999 "the seconds to wait for another run to leave this box"
check_number STOP_TIMEOUT 1 999999 "the seconds that a training has to end before it is killed"

for name in MODELS DATA MINDSPEED_LLM BOX_LOCK; do  # from where the script was called
    [[ -z ${!name:-} ]] || printf -v "$name" '%s' "$(realpath -m "${!name}")"
done
[[ ${PYTHON:-} != */* ]] || PYTHON=$(realpath -ms "$PYTHON")  # not what it links to: a venv is known by its path
[[ ! -e ${GSM8K:-} ]] || GSM8K=$(realpath "$GSM8K")  # else a name on the Hub
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -z ${MODELS:-} ]] || export MODELS
[[ -z ${DATA:-} ]] || export DATA

# $PYTHON if it is given, else the .venv of this checkout, else the shell's own; `ray` is the one beside it.
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then
    PATH=$PWD/.venv/bin:$PATH
elif [[ ${PYTHON:-} == */* ]]; then
    PATH=$(dirname "$PYTHON"):$PATH
fi
PYTHON=${PYTHON:-python}
command -v "$PYTHON" > /dev/null || fail "there is no $PYTHON here: set PYTHON to a Python 3.11, or make a .venv with \`make install\`" 2

if ! $dry_run; then
    scratch=$(mktemp -d /tmp/qerl-ray.XXXXXX)  # short: Ray's sockets are in it, and a socket's path has at most 107 characters
    trap '' PIPE  # when nobody reads any more, a print fails, which ends this script in order
fi
trap stop EXIT
trap 'interrupted Ctrl-C 130' INT
trap 'interrupted SIGTERM 143' TERM
trap 'interrupted SIGHUP 129' HUP

# What the config asks for, as assignments to these; stops here if it cannot be launched, such as for a layout that cannot exist.
npus='' nodes='' divided='' cpus='' model='' load='' data_path='' train_file='' test_file='' max_prompt_length='' conversion=()
interface='' interfaces=''
facts=$(mktemp)
attend 'the config is read' "$PYTHON" examples/grpo/facts.py --config-name "$CONFIG" ${NNODES:+--nodes "$NNODES"} \
    --address "${NODE_ADDR:-}" --master "${MASTER_ADDR:-}" ${overrides[@]+"${overrides[@]}"} > "$facts"
# shellcheck source=/dev/null
source "$facts"
((${#conversion[@]} == 0)) || conversion[0]=$PYTHON
[[ -z $divided ]] || overrides+=("$divided")
npus_here=$((npus / nodes))

if ((nodes == 1)) || [[ -n ${RAY_ADDRESS:-} ]]; then
    [[ $NODE_RANK == 0 ]] || fail "NODE_RANK=$NODE_RANK must be 0: this is a launch on one node, leave NODE_RANK out" 2
    NODE_ADDR=127.0.0.1 MASTER_ADDR=127.0.0.1
else
    check_number NODE_RANK 0 $((nodes - 1)) "which of the $nodes nodes this is, 0 for the first"
    [[ -n ${NODE_ADDR:-} ]] || fail "set NODE_ADDR to this node's address in the network that the $nodes nodes share" 2
    if ((NODE_RANK == 0)); then
        MASTER_ADDR=$NODE_ADDR
    else
        [[ -n ${MASTER_ADDR:-} ]] || fail "set MASTER_ADDR to node 0's address" 2
        [[ $NODE_ADDR != "$MASTER_ADDR" ]] || fail "NODE_ADDR=$NODE_ADDR is MASTER_ADDR, node 0's address: set it to this node's own" 2
    fi
fi

# ---------------------------------------------------------------------------------------------------------------------------- environment

if ! $dry_run; then
    if [[ -n ${RAY_ADDRESS:-} ]]; then own_box --shared; else own_box --exclusive; fi
fi

if [[ -z ${ASCEND_HOME_PATH:-} ]]; then
    for file in "${ASCEND_ROOT:=/usr/local/Ascend}"/{cann,ascend-toolkit}/set_env.sh; do
        [[ -f $file ]] || continue
        foreign "$file"
        break
    done
fi
if [[ -z ${ATB_HOME_PATH:-} && -f ${ASCEND_ROOT:=/usr/local/Ascend}/nnal/atb/set_env.sh ]]; then
    foreign "$ASCEND_ROOT/nnal/atb/set_env.sh"
fi
if [[ ${LD_PRELOAD:-} != *jemalloc* ]]; then
    for file in "${JEMALLOC-/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2}" /usr/lib64/libjemalloc.so.2; do
        [[ -f $file ]] || continue
        said=$($dry_run || LD_PRELOAD=$file env true 2>&1) || said+=" (it ends with status $?)"
        if [[ -n $said ]]; then  # such as one for pages of 4 KB, on a kernel of 64 KB
            printf '%s\n' "launch: $file cannot be preloaded, and is left out (JEMALLOC names another): ${said##*$'\n'}"
            break
        fi
        run export LD_PRELOAD="$file${LD_PRELOAD:+:$LD_PRELOAD}"
        break
    done
fi
soft=$(ulimit -Sn)
if [[ $soft != unlimited ]] && ((soft < 32768)); then
    run ulimit -Sn 32768 2> /dev/null || {
        printf '%s\n' "launch: no more than $(ulimit -Hn) open files are allowed here (the container's --ulimit nofile=65536)"
        run ulimit -Sn "$(ulimit -Hn)"
    }
fi

# Before the preflight, which looks at what is set.
if [[ -n ${RAY_ADDRESS:-} ]]; then
    if [[ $RAY_ADDRESS =~ ^\[?([^]/]+)]?:([0-9]+)$ ]] && ! $dry_run && ! listens "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"; then
        fail "nobody answers at RAY_ADDRESS=$RAY_ADDRESS: \`unset RAY_ADDRESS\` for a Ray of this run's own, or start that one"
    fi
elif ((nodes == 1)); then
    # Ray takes 127.0.0.1 for the host's public address and listens on every interface, unless it is told not to be a cluster
    # (ray/_private/services.py:resolve_ip_for_localhost, ray_constants.py:ENABLE_RAY_CLUSTER).
    run export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
else
    # Ray's GCS and raylets listen on every interface as soon as the address is not loopback, and have no option: they ask for a token.
    [[ -f ${RAY_AUTH_TOKEN_PATH:=~/.ray/auth_token} ]] || $dry_run ||
        fail "no $RAY_AUTH_TOKEN_PATH: make it with \`ray get-auth-token --generate\` and copy it to the other nodes (RAY_AUTH_TOKEN_PATH)"
    run export RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH"
    interface=${SOCKET_IFNAME:-$interface}
    [[ -n $interface ]] || $dry_run ||
        fail "no network interface here has NODE_ADDR=$NODE_ADDR; there are $interfaces. Set NODE_ADDR, or SOCKET_IFNAME to an interface"
    interface=${interface:-"<interface of $NODE_ADDR>"}
    run export "HCCL_IF_IP=$NODE_ADDR" "HCCL_SOCKET_IFNAME=$interface" "GLOO_SOCKET_IFNAME=$interface" "TP_SOCKET_IFNAME=$interface"
fi
if [[ -z ${RAY_ADDRESS:-} ]] && ((NODE_RANK == 0)) && ! $dry_run && listens "$NODE_ADDR" "$RAY_PORT"; then
    fail "port $RAY_PORT is taken: set RAY_PORT to the first of two free ones"
fi

# ------------------------------------------------------------------------------------------------------------------------------ preflight

preflight() {
    local options=("$@")
    [[ -n ${RAY_ADDRESS:-} ]] || options+=(--own-ray)
    run_attended 'the preflight runs' \
        "$PYTHON" tools/preflight.py --config-name "$CONFIG" ${options[@]+"${options[@]}"} ${overrides[@]+"${overrides[@]}"} || {
        local status=$?
        printf '\n%s\n' "Stopped by the preflight; no training was started. To rehearse this config without NPUs:" >&2
        show "$PYTHON" cli/train_grpo.py --config-name "$CONFIG" engine=local rehearsal.enabled=true >&2
        exit $status
    }
}

# What is not there yet and is made by node 0, for all that see its disk: the preflight knows that, and is asked once more when it is.
later=() folder=''
[[ -f $train_file && -f $test_file ]] || later+=(--later 'test rows')
[[ -f ${data_path}_packed_input_ids_document.bin ]] || later+=(--later 'training files')
if [[ -n $load && ! -f $load/latest_checkpointed_iteration.txt ]]; then
    later+=(--later 'base weights')
    if ((NODE_RANK == 0)); then
        IFS=: read -ra folders <<< "${MINDSPEED_LLM:-MindSpeed-LLM:${PYTHONPATH:-}}"
        for folder in "${folders[@]}"; do
            [[ ! -f $folder/${conversion[1]} ]] || break
        done
        [[ -f $folder/${conversion[1]} ]] || folder=${MINDSPEED_LLM:-MindSpeed-LLM}
    fi
fi

preflight ${later[@]+"${later[@]}"}
[[ -z $folder || -f $folder/${conversion[1]} ]] || $dry_run || fail "MindSpeed-LLM converts the base weights: set MINDSPEED_LLM to its folder"

# ---------------------------------------------------------------------------------------------------------------------------- conversions

say() {
    $dry_run || printf '%s\n' "launch: $1"
}
made=${later[*]-}
if ((NODE_RANK > 0)); then
    made=''
    $dry_run || wait_for_head
fi
convert=("$PYTHON" tools/convert_gsm8k.py --input "${GSM8K:-openai/gsm8k}")
if [[ $made == *'test rows'* ]]; then
    say 'GSM8K is converted to text: seconds, and a download if it comes from the Hub'
    run_attended 'the data is converted' "${convert[@]}" --output "$(dirname "$test_file")"
fi
if [[ $made == *'training files'* ]]; then
    say "GSM8K is converted to the model's token ids: a minute"
    run_attended 'the data is converted' \
        "${convert[@]}" --output "$(dirname "$data_path")" --format mindspeed --tokenizer "$model" --max-prompt-length "$max_prompt_length"
fi
if [[ -n $folder ]]; then
    say "the base weights are converted: the whole model is read and written, minutes to hours"
    half=$load/latest_checkpointed_iteration.txt  # written first (MindSpeed-LLM tasks/checkpoint/convert.py:62)
    here=$PWD
    run cd "$folder"
    run_attended 'the base weights are converted' env CUDA_DEVICE_MAX_CONNECTIONS=1 "${conversion[@]}"
    $dry_run || cd "$here"
    half=''
fi
((${#later[@]} == 0)) || preflight

# ------------------------------------------------------------------------------------------------------------------------------------ Ray

if [[ -n ${RAY_ADDRESS:-} ]]; then
    printf '%s\n' "launch: Ray at $RAY_ADDRESS is joined, and left as it is"
else
    start=(ray start --block "--node-ip-address=$NODE_ADDR" "--resources={\"NPU\": $npus_here}" "--num-cpus=$cpus" --disable-usage-stats
           --min-worker-port=20002 --max-worker-port=29999)  # Ray's 10002 to 19999 have HCCL's in them
    if ((NODE_RANK == 0)); then
        start+=(--head "--port=$RAY_PORT" "--ray-client-server-port=$((RAY_PORT + 1))" "--temp-dir=${scratch:-/tmp/qerl-ray.XXXXXX}"
                --include-dashboard=false --dashboard-host=127.0.0.1 --no-monitor)
    else
        start+=("--address=$MASTER_ADDR:$RAY_PORT")
    fi
    ((nodes == 1)) || start+=("--labels=NODE_RANK=$NODE_RANK")
    show "${start[@]}"
    if ! $dry_run; then
        setsid "${start[@]}" > "$scratch/ray.log" 2>&1 &
        ray=$!
    fi
    if ((NODE_RANK > 0)); then
        $dry_run && exit
        serve
    fi
    run export "RAY_ADDRESS=$NODE_ADDR:$RAY_PORT"
    run_attended 'Ray starts, and its NPUs are waited for' "$PYTHON" examples/grpo/wait_for_npus.py \
        --nodes "$nodes" --npus "$npus" --timeout "$NODE_TIMEOUT" --ray-process "${ray:-PID}" || {
        (($? != 3)) || cat "$scratch/ray.log" >&2
        exit 1
    }
fi

# ------------------------------------------------------------------------------------------------------------------------------- training

# What the training prints, and into launch.log of the run directory as soon as the training has named it. When nobody reads it any more
# the launch ends in order, and the log is kept till then.
keep_log() {
    local line held='' log=''
    trap '' INT TERM HUP  # it ends when the training has closed its output
    while IFS= read -r line || [[ -n $line ]]; do
        printf '%s\n' "$line" 2> /dev/null || kill -HUP $$
        if [[ -n $log ]]; then
            printf '%s\n' "$line" >> "$log"
        else
            held+="$line"$'\n'
            if [[ $line == 'Run directory: '* ]]; then
                log="${line#Run directory: }/launch.log"
                printf '%s' "$(realpath "${line#Run directory: }")" > "$scratch/run"
                [[ -z $lock ]] || sign_box "$(< "$scratch/run")"
                printf '%s' "$held" >> "$log"
            fi
        fi
    done
}

training=("$PYTHON" -u cli/train_grpo.py --config-name "$CONFIG" ${overrides[@]+"${overrides[@]}"})
show "${training[@]}"
$dry_run && exit
mkfifo "$scratch/output"
keep_log < "$scratch/output" &
log=$!
setsid "${training[@]}" > "$scratch/output" 2>&1 &
train=$! doing='the training runs'
status=0
if ((nodes > 1)) && [[ -n $ray ]]; then
    attend_nodes || status=$?
else
    wait "$train" || status=$?
fi
train=''
exit "$status"
