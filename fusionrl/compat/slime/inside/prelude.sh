# Every bash of a launch script reads this first (BASH_ENV): programs are recorded, nothing waits, and what only the
# machine of the run knows is a part between U+E000 and U+E001. Its spaces, `$` and brackets are moved by U+E100, so that a
# shell that reads the part again leaves it alone.
BASH_COMPAT=4.3 # `break` in a function ends the loop of its caller
shopt -s expand_aliases
alias declare='declare -g' typeset='typeset -g' # a sourced file is read within the function `source`

_mark_call() {
    local _text
    printf -v _text ' %q' "$@"
    _text=${_text# } _text=${_text//[$'\ue000\ue001']/}
    _text=${_text// /$'\ue120'} _text=${_text//\$/$'\ue124'} _text=${_text//\(/$'\ue128'} _text=${_text//\)/$'\ue129'}
    printf '\ue000\ue124\ue128%s\ue129\ue001' "$_text"
}
_note() { printf '%s\0' "$*" >> "$BOX_LOG/notes"; }

# Print the file or folder here for a path on the author's machine: the longest end of it that is at or above the script.
_find() {
    local path=$1 folder
    if [[ -e $path ]]; then
        printf %s "$path"
        return
    fi
    path=${path#"$BOX"}
    path=${path##*$'\ue001'}
    while [[ $path == /* || $path == ./* || $path == ../* ]]; do path=${path#*/}; done
    while :; do
        for folder in "$PWD" "$BOX_FOLDER"; do
            while [[ $folder == "$BOX"/* ]]; do
                if [[ -e $folder/$path ]]; then
                    printf %s "$folder/$path"
                    return
                fi
                folder=${folder%/*}
            done
        done
        path=${path#*/}
        [[ $path == */* ]] || return 1 # a file's name alone is not enough
    done
}

source() {
    local _file
    if _file=$(_find "$1"); then
        [[ $1 != /* || $1 -ef $_file ]] || _note "source $1: read from $_file"
        shift
        builtin source "$_file" "$@"
    else
        _note "source $1: the file is not there, what it sets is not known"
    fi
}

cd() {
    local to=${@: -1} _there
    if [[ $to == $'\ue000'* ]]; then
        PWD=$to
    elif ! builtin cd "$@" 2> /dev/null; then
        _there=$(_find "$to") || { mkdir -p "$to" && _there=$to; }
        builtin cd "$_there"
    fi
}
pwd() { printf '%s\n' "$PWD"; }
cat() { command cat "$@" 2> /dev/null || _mark_call cat "$@"; }

# A number that is not known counts as 0, so that the node is the first one.
[() {
    local _words=("$@")
    if [[ $* == *$'\ue000'* && " $* " =~ \ -(eq|ne|lt|le|gt|ge)\  ]]; then
        _words=("${_words[@]/*$'\ue000'*/0}")
    fi
    builtin [ "${_words[@]}"
}

exit() {
    local _code=${1:-$?}
    if ((_code != 0 && BASH_SUBSHELL == 0 && ++_num_exits <= 3)); then
        _note "line ${BASH_LINENO[0]}: \`exit $_code\` is passed over"
        return 0
    fi
    builtin exit "$_code"
}

declare -A _slept
sleep() {
    ((++_slept[${BASH_LINENO[0]}] > 5)) && break
    return 0
}

# In the weak mode a signal could reach other processes of the user.
enable -n kill
kill() { :; }

_record() {
    local _files=("$BOX_LOG"/*.argv)
    if ((${#_files[@]} >= BOX_MAX_RECORDS)); then
        _note "the script has started $BOX_MAX_RECORDS programs: what it starts later is not known"
        enable kill
        builtin kill -KILL 0 # the script's process group
    fi
    local _file=$BOX_LOG/$EPOCHREALTIME.$BASHPID
    [[ "$*" != *train* ]] || env -0 > "$_file.env"
    printf '%s\0' "$@" > "$_file.argv"
}

# A program that is called: record it, and run the shell texts and inline Python that it was given.
_stand_in() {
    local name=$1 place
    shift
    case $name in
    sudo) "$@" && return ;;
    pkill | kill | killall | ps) return ;;
    pgrep) return 1 ;;
    nvidia-smi | rocm-smi)
        _note "$name is taken as 8 GPUs with NVLink"
        for place in {0..7}; do [[ $* == *query* ]] && echo "$place" || echo "GPU $place: NV18 NVLink"; done
        return
        ;;
    git) [[ $* == *--show-toplevel* ]] && echo "$BOX_ROOT" && return ;;&
    git | date | hostname | whoami | ip | scontrol)
        _mark_call "$name" "$@"
        return
        ;;
    esac
    _record "$name" "$@"
    if [[ $name == python* ]]; then
        [[ ${1:--} == -* && ${1:--} != -[uBm]* ]] || [[ -p /proc/self/fd/1 && $* != *train.py* && $* != *train_async.py* ]] || return 0
        exec "$BOX_PYTHON" -S -E "$BOX_HOME/launcher.py" "$@"
    fi
    for ((place = 1; place <= $#; place++)); do
        case ${!place} in
        bash | sh | */bash | */sh) exec bash "${@:place+1}" ;;
        *[[:space:]]*) [[ ${!place} =~ (^|[[:space:]/\"\'])train(_async)?\.py ]] && exec bash -c "${!place}" ;;
        esac
    done
    [[ ! -p /proc/self/fd/1 || $* == *train.py* || $* == *train_async.py* ]] || _mark_call "$name" "$@"
}
command_not_found_handle() { _stand_in "$@"; }

if [[ $0 != "$BOX_HOME"/bin/* ]]; then
    exec {BASH_XTRACEFD}>> "$BOX_LOG/trace"
    PS4='+${BASH_SOURCE##*/}:$LINENO:'
    set -x
fi
