#!/usr/bin/env bash
# Bring the environment up to date, then lint, check types and run the tests.
#
#   scripts/test.sh [unit] [pytest arguments...]
#
#   unit   the quick tests only: no engine is started and no pipeline runs
#
# Tests marked gpu run only where a CUDA device is; elsewhere they are skipped and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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

echo "== mypy fusionrl"
"$bin/mypy" fusionrl || status=1

# Said here and not at the end: pytest's summary closes the output.
[ "$status" -eq 0 ] || echo "== lint or types FAILED, see above; this run will exit with an error"
echo "== pytest"
# A test that hangs prints where it hangs, instead of leaving an empty log.
run_tests() { "$bin/python" -m pytest -q --durations=15 -o faulthandler_timeout=600 "$@" || [ $? -eq 5 ] || status=1; }
if [ -n "$only_unit" ]; then
  run_tests -m "not e2e and not engine" "$@"
elif [ $# -gt 0 ]; then
  run_tests "$@"
else
  # The cores wait for processes most of the time: two tests at a time, but for what measures time.
  # In the order of tests/conftest.py, the longest files first: xdist's own begins with those of the most tests.
  run_tests -m "not e2e and not timed" -n 2 --dist loadfile --no-loadscope-reorder
  echo "== pytest, what measures time"
  run_tests -m timed
  # Whole runs wait for each other more than they compute: two at a time.
  echo "== pytest, whole runs"
  run_tests -m e2e -n 2 --dist loadgroup
fi
exit "$status"
