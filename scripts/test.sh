#!/usr/bin/env bash
# Bring the environment up to date, then lint, check types and run the tests.
#
#   scripts/test.sh [unit] [pytest arguments...]
#   scripts/test.sh --set gpu [arguments of tools/gpu_set.py...]
#
#   unit        the quick tests only: no engine is started and no pipeline runs
#   --set gpu   instead: install the GPU requirement set into .venv-gpu (Python 3.12, 11 GB; it compiles Transformer
#               Engine's extension) and run on it what a machine without a GPU can (docs/results/gpu-results.md)
#
# Tests marked gpu run only where a CUDA device is; elsewhere they are skipped and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --set ]; then
  [ "${2:-}" = gpu ] || { echo "test.sh: error: --set ${2:-}: the only other set is gpu" >&2; exit 2; }
  shift 2
  # The programs below set up the environment, too; so they must mean the same one.
  export FUSIONRL_ENV=gpu FUSIONRL_VENV=${FUSIONRL_VENV:-.venv-gpu}
  scripts/setup-env.sh examples
  exec "$FUSIONRL_VENV/bin/python" tools/gpu_set.py "$@"
fi
scripts/setup-env.sh examples
# Some environments set this; the hundreds of processes of a run would each compile our sources anew.
unset PYTHONDONTWRITEBYTECODE
bin=${FUSIONRL_VENV:-.venv}/bin

only_unit=
if [ "${1:-}" = unit ]; then
  shift
  only_unit=1
fi

status=0
echo "== ruff check"
"$bin/ruff" check . || status=1
echo "== ruff format --check"
"$bin/ruff" format --check . || status=1

check_types() {
  local said failed=0
  said=$("$bin/mypy" fusionrl 2>&1) || failed=1
  printf '\n== mypy fusionrl\n%s\n' "$said"
  return "$failed"
}
# A test that hangs prints where it hangs, instead of leaving an empty log.
run_tests() {
  echo "== pytest $*"
  "$bin/python" -m pytest -q --durations=15 -o faulthandler_timeout=600 "$@" || [ $? -eq 5 ] || status=1
}
# pytest's summary closes the output: failures of lint and types are said before it.
say_failed() { echo "== lint or types FAILED, see above; this run will exit with an error"; }

if [ -n "$only_unit" ] || [ $# -gt 0 ]; then
  check_types || status=1
  [ "$status" -eq 0 ] || say_failed
  if [ -n "$only_unit" ]; then set -- -m "not e2e and not engine" "$@"; fi
  run_tests "$@"
  exit "$status"
fi

[ "$status" -eq 0 ] || say_failed
# Tests that measure time run alone; only the files that have such a test, as all take 15 s to collect.
# shellcheck disable=SC2046 # a word is a file
run_tests -m timed $(grep -rlw --include='test_*.py' timed tests)
# Types are checked during the first whole runs, which wait for processes some of the time.
{ check_types || { say_failed; exit 1; }; } &
types=$!
# A whole run or a file each, in the order of tests/conftest.py.
run_tests -m "not timed" -n 3 --dist loadgroup --no-loadscope-reorder
wait "$types" || status=1
exit "$status"
