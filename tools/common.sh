# Shared by the scripts beside it: source it, do not run it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s: %s\n' "${0##*/}" "$*"; }
fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# Compilers to run at once: one a core, but no more than one for each 2 GiB of memory that is free.
jobs() {
  local cores free_kib most
  cores=$(nproc)
  free_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  most=$((free_kib / 2097152))
  ((most >= 1)) || most=1
  echo $((cores < most ? cores : most))
}
