# shellcheck shell=bash disable=all
# Written for the tests, with what NNAL's own atb/set_env.sh does: it reads the arguments of whoever sources it, asks
# Python for torch's ABI, and returns early.
function get_cxx_abi_option()
{
    cxx_abi=""
    until [[ -z "$1" ]]
    do
        case "$1" in
            --cxx_abi=*) cxx_abi="${1#*=}" ;;
        esac
        shift
    done
    if [ -z "$cxx_abi" ]; then
        cxx_abi=$(false | cat $NO_SUCH_VARIABLE /proc/self/nothing 2> /dev/null | grep 1 | wc -l)
    fi
}

atb_path="${BASH_SOURCE[0]}"
if [[ -f "$atb_path" ]] && [[ "$atb_path" =~ 'set_env.sh' ]]; then
    get_cxx_abi_option "$@"
    export ATB_HOME_PATH=$(cd $(dirname $atb_path) && pwd -P)/latest/atb/cxx_abi_${cxx_abi}
    export LD_LIBRARY_PATH=$ATB_HOME_PATH/lib:$ATB_HOME_PATH/examples:$ATB_HOME_PATH/tests/atbopstest:$LD_LIBRARY_PATH
    export PATH=$ATB_HOME_PATH/bin:$PATH
    export ATB_STREAM_SYNC_EVERY_KERNEL_ENABLE=0
    [ $ATB_WORKSPACE_MEM_ALLOC_GLOBAL ] || return 1
else
    echo "There is no 'set_env.sh' to import"
fi
