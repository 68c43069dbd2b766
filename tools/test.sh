#!/usr/bin/env bash
# Runs the tests of one build and closes with a plain line `N passed, N failed`.
#
#   tools/test.sh                 ctest and pytest on the release build
#   tools/test.sh asan-ubsan      ctest on that build (tsan likewise)
#
# PYTEST_ARGS and CTEST_ARGS are handed on.
source "$(dirname "$0")/common.sh"
preset=${1:-release}
case $preset in
  release) folder=build ;;
  asan-ubsan) folder=build-asan ;;
  tsan) folder=build-tsan ;;
  *) fail "there is no preset \"$preset\"; there are release, asan-ubsan and tsan." ;;
esac
results=out/test
mkdir -p $results
rm -f $results/"$preset"-*.xml
failed=0

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}

say "ctest on $folder"
ctest --test-dir $folder --output-on-failure --no-tests=ignore -j "$(jobs)" \
  --output-junit "$PWD/$results/$preset-ctest.xml" ${CTEST_ARGS:-} || failed=1

if [ "$preset" = release ]; then
  say "pytest"
  status=0
  # A file stays in one process: its tests share a daemon or a trained model.
  .venv/bin/python -m pytest -n "$(jobs)" --dist loadfile --junitxml="$results/$preset-pytest.xml" ${PYTEST_ARGS:-} || status=$?
  # 5: no test was collected; ctest's count stands alone then.
  [ $status = 0 ] || [ $status = 5 ] || failed=1
fi

python=.venv/bin/python
[ -x $python ] || python=python3
"$python" tools/count_tests.py $results/"$preset"-*.xml || failed=1
exit $failed
