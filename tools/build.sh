#!/usr/bin/env bash
# Configures (once) and builds a preset of CMakePresets.json: tools/build.sh [release|asan-ubsan|tsan]
source "$(dirname "$0")/common.sh"
preset=${1:-release}
case $preset in
  release) folder=build ;;
  asan-ubsan) folder=build-asan ;;
  tsan) folder=build-tsan ;;
  *) fail "there is no preset \"$preset\"; there are release, asan-ubsan and tsan." ;;
esac
log=.cache/configure-$preset.log
mkdir -p .cache

if [ ! -e $folder/build.ninja ] || [ CMakePresets.json -nt $folder/build.ninja ]; then
  say "configuring $folder"
  if ! cmake --preset "$preset" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "cmake could not configure $folder; its output is in $log."
  fi
fi
say "building $folder with $(jobs) jobs"
cmake --build $folder -j "$(jobs)"

# The package is built into build/python; this makes `import misa` work in .venv.
if [ "$preset" = release ] && [ -x .venv/bin/python ]; then
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  echo "$PWD/build/python" >"$site/misa.pth"
fi
