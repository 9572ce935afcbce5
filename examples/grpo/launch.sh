# shellcheck shell=bash
# What every grpo_trainer_*.sh does, sourced with CONFIG (and NODES) set: environment, conversions, preflight, Ray, training (docs/launch.md).
set -euo pipefail

usage() {
    cat <<EOF
usage: [VARIABLE=value ...] bash $0 [--config-name NAME] [--dry-run] [key=value ...]

Converts what is missing, checks the machine, starts a Ray of its own, trains, stops that Ray. Exit status: that of the training.

  --config-name NAME  a config of configs/ (default: $CONFIG); CONFIG=NAME does the same
  --dry-run           print every command and run none
  key=value           Hydra overrides, as for cli/train_grpo.py; relative paths in them are relative to the repository

Variables (docs/launch.md has them all): PYTHON, MODELS, DATA, GSM8K, MINDSPEED_LLM, RAY_ADDRESS, RAY_PORT, TRUST_REMOTE_CODE;
two nodes: NODE_RANK, NODE_ADDR, MASTER_ADDR, RAY_AUTH_TOKEN_PATH, NODE_TIMEOUT
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

listens() {  # address port
    (exec 3<> "/dev/tcp/$1/$2") 2> /dev/null
}

# ------------------------------------------------------------------------------------------------------------------------------ arguments

dry_run=false
overrides=()
while (($#)); do
    case $1 in
        --help | -h) usage; exit ;;
        --dry-run) dry_run=true ;;
        --config-name=* | -cn=*) CONFIG=${1#*=} ;;
        --config-name | -cn) (($# > 1)) || fail "$1 needs a name" 2; CONFIG=$2; shift ;;
        -*) fail "unknown option $1; --help lists them" 2 ;;
        *=*) overrides+=("$1") ;;
        *) fail "$1 is neither an option nor an override key=value; --help" 2 ;;
    esac
    shift
done
case ${TRUST_REMOTE_CODE:-false} in
    true) overrides+=(generate_config.trust_remote_code=true) ;;  # the model's own Python runs in vLLM's workers
    false) ;;
    *) fail "TRUST_REMOTE_CODE=$TRUST_REMOTE_CODE must be true or false" 2 ;;
esac

NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-0} RAY_PORT=${RAY_PORT:-6380} NODE_TIMEOUT=${NODE_TIMEOUT:-600}
check_number NODES 1 9999 "on how many nodes the launcher is started; leave it out for the launcher's own number"
if ((NODES == 1)); then
    [[ $NODE_RANK == 0 ]] || fail "NODE_RANK=$NODE_RANK must be 0: this is a launch on one node, leave NODE_RANK out" 2
else
    check_number NODE_RANK 0 $((NODES - 1)) "which of the $NODES nodes this is, 0 for the first"
fi
check_number RAY_PORT 1024 65534 "Ray takes it and the next port"
check_number NODE_TIMEOUT 1 999999 "the seconds to wait for all NPUs"

for name in MODELS DATA MINDSPEED_LLM; do  # from where the script was called
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

if ((NODES == 1)); then
    NODE_ADDR=127.0.0.1 MASTER_ADDR=127.0.0.1
elif ((NODE_RANK == 0)); then
    [[ -n ${NODE_ADDR:-} ]] || fail "set NODE_ADDR to this node's address in the network that the nodes share" 2
    MASTER_ADDR=$NODE_ADDR
else
    [[ -n ${NODE_ADDR:-} && -n ${MASTER_ADDR:-} ]] || fail "set MASTER_ADDR to node 0's address and NODE_ADDR to this node's" 2
fi

# What the config asks for, as assignments to these; stops here if it cannot be launched, such as for a layout that cannot exist.
npus='' cpus='' model='' load='' data_path='' train_file='' test_file='' max_prompt_length='' conversion=()
facts=$("$PYTHON" examples/grpo/facts.py --config-name "$CONFIG" --nodes "$NODES" ${overrides[@]+"${overrides[@]}"}) || exit
eval "$facts"
((${#conversion[@]} == 0)) || conversion[0]=$PYTHON
npus_here=$((npus / NODES))

# ---------------------------------------------------------------------------------------------------------------------------- environment

if [[ -z ${ASCEND_HOME_PATH:-} ]]; then
    for file in "${ASCEND_ROOT:=/usr/local/Ascend}"/{cann,ascend-toolkit}/set_env.sh; do
        [[ -f $file ]] || continue
        set +u  # CANN's script reads variables that are not set
        # shellcheck source=/dev/null
        run source "$file"
        set -u
        break
    done
fi
if [[ -z ${ATB_HOME_PATH:-} && -f ${ASCEND_ROOT:=/usr/local/Ascend}/nnal/atb/set_env.sh ]]; then
    set +u
    # shellcheck source=/dev/null
    run source "$ASCEND_ROOT/nnal/atb/set_env.sh"
    set -u
fi
if [[ ${LD_PRELOAD:-} != *jemalloc* ]]; then
    for file in "${JEMALLOC-/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2}" /usr/lib64/libjemalloc.so.2; do
        [[ -f $file ]] || continue
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

# ------------------------------------------------------------------------------------------------------------------------------ preflight

preflight() {
    local options=()
    ((NODES == 1)) || options+=(--nodes "$NODES")
    [[ -n ${RAY_ADDRESS:-} ]] || options+=(--own-ray)
    run "$PYTHON" tools/preflight.py --config-name "$CONFIG" ${options[@]+"${options[@]}"} ${overrides[@]+"${overrides[@]}"} || {
        local status=$?
        printf '\n%s\n' "Stopped by the preflight; nothing was started. To rehearse this config without NPUs:" >&2
        show "$PYTHON" cli/train_grpo.py --config-name "$CONFIG" engine=local rehearsal.enabled=true >&2
        exit $status
    }
}

# Nothing is converted for a machine that cannot run it.
shopt -s nullglob
devices=(/dev/davinci[0-9]*)
shopt -u nullglob
$dry_run || ((${#devices[@]} >= npus_here)) || preflight

# ---------------------------------------------------------------------------------------------------------------------------- conversions

if ((NODE_RANK == 0)); then  # the others find the same files, or their preflight names what is missing
    convert=("$PYTHON" tools/convert_gsm8k.py --input "${GSM8K:-openai/gsm8k}")
    if [[ ! -f $train_file || ! -f $test_file ]]; then
        run "${convert[@]}" --output "$(dirname "$test_file")"
    fi
    if [[ ! -f ${data_path}_packed_input_ids_document.bin ]]; then
        run "${convert[@]}" --output "$(dirname "$data_path")" --format mindspeed --tokenizer "$model" --max-prompt-length "$max_prompt_length"
    fi
    if [[ -n $load && ! -f $load/latest_checkpointed_iteration.txt ]]; then
        IFS=: read -ra folders <<< "${MINDSPEED_LLM:-MindSpeed-LLM:${PYTHONPATH:-}}"
        for folder in "${folders[@]}"; do
            [[ ! -f $folder/${conversion[1]} ]] || break
        done
        $dry_run || [[ -f $folder/${conversion[1]} ]] || fail "MindSpeed-LLM converts the base weights: set MINDSPEED_LLM to its folder"
        (
            run cd "$folder"
            run env CUDA_DEVICE_MAX_CONNECTIONS=1 "${conversion[@]}"
        )
    fi
fi

preflight

# ------------------------------------------------------------------------------------------------------------------------------------ Ray

scratch=/tmp/qerl-ray.XXXXXX ray='' train='' log=''

# Whatever ends this script: the training is told, and writes down why it stopped; then the Ray that was started here is stopped. `ray stop`
# would stop every Ray of this user. Both have sessions of their own (setsid), so that of what is sent to this script's group, such as a
# Ctrl-C, they learn here only, once, and in this order.
# shellcheck disable=SC2329  # the trap calls it
stop() {
    local status=$?
    trap '' INT TERM HUP
    set +e
    if [[ -n $train ]]; then
        kill -TERM "$train"
        wait "$train"
    fi
    [[ -z $log ]] || wait "$log"
    if [[ -n $ray ]]; then
        show kill "$ray"
        kill -TERM "$ray" 2> /dev/null  # gone already if it was Ray that ended
        for _ in {1..100}; do  # `ray start --block` ends its processes and then itself; what is left of its session after 10 s is killed
            pgrep -s "$ray" > /dev/null || break
            sleep 0.1
        done
        pkill -KILL -s "$ray"
        wait "$ray"
    fi
    if ((status == 0)); then
        rm -rf "$scratch"
    else
        printf '%s\n' "launch: Ray's logs are left in $scratch" >&2
    fi
    exit "$status"
}
if ! $dry_run; then
    scratch=$(mktemp -d "$scratch")  # short: Ray's sockets are in it, and a socket's path has at most 107 characters
    trap stop EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    trap '' PIPE  # when nobody reads any more, a print fails, which ends this script in order
fi

if [[ -n ${RAY_ADDRESS:-} ]]; then
    printf '%s\n' "launch: Ray at $RAY_ADDRESS is joined, and left as it is"
else
    start=(ray start --block "--node-ip-address=$NODE_ADDR" "--resources={\"NPU\": $npus_here}" "--num-cpus=$cpus" --disable-usage-stats)
    if ((NODES == 1)); then
        # Ray takes 127.0.0.1 for the host's public address and listens on every interface, unless it is told not to be a cluster
        # (ray/_private/services.py:resolve_ip_for_localhost, ray_constants.py:ENABLE_RAY_CLUSTER).
        run export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
    else
        # Ray's GCS and raylets listen on every interface as soon as the address is not loopback, and have no option: they ask for a token.
        [[ -f ${RAY_AUTH_TOKEN_PATH:=$HOME/.ray/auth_token} ]] || $dry_run ||
            fail "no $RAY_AUTH_TOKEN_PATH: make it with \`ray get-auth-token --generate\` and copy it to the other node (RAY_AUTH_TOKEN_PATH)"
        run export RAY_AUTH_MODE=token "RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH"
        interface=${SOCKET_IFNAME:-$(ip -brief address show to "$NODE_ADDR" 2> /dev/null | cut -d ' ' -f 1)}
        [[ -n $interface ]] || $dry_run || fail "no network interface has NODE_ADDR=$NODE_ADDR"
        interface=${interface:-"<interface of $NODE_ADDR>"}
        run export "HCCL_IF_IP=$NODE_ADDR" "HCCL_SOCKET_IFNAME=$interface" "GLOO_SOCKET_IFNAME=$interface" "TP_SOCKET_IFNAME=$interface"
    fi
    if ((NODE_RANK == 0)); then
        start+=(--head "--port=$RAY_PORT" "--ray-client-server-port=$((RAY_PORT + 1))" "--temp-dir=$scratch"
                --include-dashboard=false --dashboard-host=127.0.0.1 --no-monitor)
        $dry_run || ! listens "$NODE_ADDR" "$RAY_PORT" || fail "port $RAY_PORT is taken: set RAY_PORT to the first of two free ones"
    else
        start+=("--address=$MASTER_ADDR:$RAY_PORT")
    fi
    show "${start[@]}"
    if ! $dry_run; then
        setsid "${start[@]}" > "$scratch/ray.log" 2>&1 &
        ray=$!
    fi
    if ((NODE_RANK > 0)); then
        $dry_run && exit
        printf '%s\n' "launch: node $NODE_RANK serves node 0 until that one stops; Ray's output is in $scratch/ray.log"
        wait "$ray"  # set -e: its status is this script's
        exit
    fi
    run export "RAY_ADDRESS=$NODE_ADDR:$RAY_PORT"
    run "$PYTHON" examples/grpo/wait_for_npus.py --nodes "$NODES" --npus "$npus" --timeout "$NODE_TIMEOUT" --ray-process "${ray:-PID}" || {
        (($? != 3)) || cat "$scratch/ray.log" >&2
        exit 1
    }
fi

# ------------------------------------------------------------------------------------------------------------------------------- training

# What the training prints, and into launch.log of the run directory as soon as the training has named it.
keep_log() {
    local line held='' log=''
    trap '' INT TERM HUP  # it ends when the training has closed its output
    while IFS= read -r line || [[ -n $line ]]; do
        printf '%s\n' "$line"
        if [[ -n $log ]]; then
            printf '%s\n' "$line" >> "$log"
        else
            held+="$line"$'\n'
            if [[ $line == 'Run directory: '* ]]; then
                log="${line#Run directory: }/launch.log"
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
train=$!
status=0
wait "$train" || status=$?
train=''
wait "$log"
exit "$status"
