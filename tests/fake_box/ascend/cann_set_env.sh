# shellcheck shell=bash disable=all
# Written for the tests, with what CANN's own set_env.sh and setenv.bash do: variables that are not set, pipelines whose
# grep finds nothing, functions, return.
CURRENT=$(cd $(dirname ${BASH_SOURCE[0]}) && pwd -P)

param_is_in_path() {
    local num=$(echo ":$2:" | grep ":$1:" | wc -l)
    return $num
}

prepend_env() {
    local name="$1" value="$2" old
    eval "old=\$$name"
    param_is_in_path "$value" "$old"
    if [ $? -ne 0 ]; then
        return
    fi
    export $name="${value}${old:+:$old}"
}

vendors=$(cat ${CURRENT}/opp/vendors/config.ini 2> /dev/null | grep load_priority | cut -d = -f 2)
num=$(echo $vendors | grep custom | wc -l)
if [ $ASCEND_SLOG_PRINT_TO_STDOUT ]; then
    echo "CANN logs to stdout"
fi

export ASCEND_TOOLKIT_HOME=$CURRENT
export ASCEND_HOME_PATH=$CURRENT
export ASCEND_AICPU_PATH=$CURRENT
export ASCEND_OPP_PATH=$CURRENT/opp
export TOOLCHAIN_HOME=$CURRENT/toolkit
prepend_env LD_LIBRARY_PATH $CURRENT/lib64
prepend_env LD_LIBRARY_PATH $CURRENT/lib64/plugin/opskernel
prepend_env PYTHONPATH $CURRENT/opp/built-in/op_impl/ai_core/tbe
prepend_env PYTHONPATH $CURRENT/python/site-packages
prepend_env PATH $CURRENT/bin
[ $num -eq 0 ] && false
