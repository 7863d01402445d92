#!/usr/bin/env bash
# Make .venv-trl: TRL in an environment of its own, for the comparison in tools/bench. Quick when nothing changed.
#
#   PYTHON=path                the interpreter; without it, that of .venv, so that both sides run on the same one
#   FUSIONRL_TORCH_INDEX=url   a further package index, for machines whose default one has no CPU build of torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-trl
python=${PYTHON:-${FUSIONRL_VENV:-.venv}/bin/python}
command -v "$python" >/dev/null || { echo "setup-trl-env: error: no $python; run scripts/setup-env.sh first" >&2; exit 1; }

exec 9>"$venv.lock"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
want=$({ "$python" -VV; cat requirements/trl.txt; } | sha256sum)
if [ -x $venv/bin/python ] && [ "$(cat $venv/.stamp 2>/dev/null)" = "$want" ]; then
  echo "setup-trl-env: $venv is up to date"
  exit 0
fi

echo "setup-trl-env: building $venv (log: $venv/install.log)"
rm -rf $venv
"$python" -m venv $venv
index=()
[ -z "${FUSIONRL_TORCH_INDEX:-}" ] || index=(--extra-index-url "$FUSIONRL_TORCH_INDEX")
if ! $venv/bin/python -m pip install --disable-pip-version-check --no-input \
  ${index[@]+"${index[@]}"} -r requirements/trl.txt >$venv/install.log 2>&1; then
  tail -n 25 $venv/install.log >&2
  echo "setup-trl-env: error: pip failed; the whole log is $venv/install.log" >&2
  exit 1
fi
echo "$want" >$venv/.stamp
echo "setup-trl-env: $venv is ready"
