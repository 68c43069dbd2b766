#!/usr/bin/env bash
# Builds the wheel, installs it into an empty folder, and trains with what is there: `make package`.
source "$(dirname "$0")/common.sh"
python=${MISA_PYTHON:-.venv/bin/python}
out=out/package
rm -rf $out
mkdir -p $out

jobs=${MISA_JOBS:-$(jobs)}
say "building the wheel with $jobs jobs"
CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$python" -m pip wheel . --quiet --disable-pip-version-check --no-build-isolation \
  --no-deps --wheel-dir $out
wheel=$(ls $out/misa-*.whl)
say "$wheel, $(stat -c %s "$wheel") bytes"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target $out/site "$wheel"
MISA_PACKAGE=$PWD/$out/site "$python" -m pytest -q tests/package/test_package.py
