#!/usr/bin/env bash
# Style: C++ by clang-format, shell scripts and Python by their parsers.
source "$(dirname "$0")/common.sh"
failed=0

mapfile -t cpp < <(git ls-files '*.h' '*.cc')
clang-format --dry-run -Werror "${cpp[@]}" || {
  say "some files are not formatted; clang-format -i FILE mends them."
  failed=1
}

while read -r script; do
  bash -n "$script" || failed=1
done < <(git ls-files 'tools/*.sh' .ci/run)

python3 - $(git ls-files '*.py') <<'PYTHON' || failed=1
import ast, sys
broken = 0
for path in sys.argv[1:]:
    try:
        ast.parse(open(path, encoding="utf-8").read(), path)
    except SyntaxError as error:
        print(f"{path}:{error.lineno}: {error.msg}")
        broken = 1
sys.exit(broken)
PYTHON

[ $failed = 0 ] && say "clean"
exit $failed
