#!/usr/bin/env bash
# Installs what building, testing and the demo need, and only what is missing: packages of the distribution
# (through sudo when not root), and a Python environment in .venv with tools/requirements*.txt.
#
#   tools/setup.sh          for make build, test, demo, bench
#   tools/setup.sh lint     for make lint: the formatter alone
#
# MISA_SKIP_PACKAGES=1 leaves the distribution's packages to you.
source "$(dirname "$0")/common.sh"
purpose=${1:-build}
log=.cache/setup.log
mkdir -p .cache

wanted() {
  if [ "$purpose" = lint ]; then
    sed -n '/^# lint$/,$ {/^#/!p}' tools/packages.txt
  else
    sed -n '1,/^# lint$/ {/^#/!p}' tools/packages.txt
  fi
}

missing_packages() {
  local installed
  installed=$(dpkg-query -W -f '${binary:Package} ${db:Status-Status}\n' 2>/dev/null | awk '$2 == "installed" {sub(/:.*/, "", $1); print $1}')
  comm -23 <(wanted | sort) <(sort <<<"$installed")
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  else
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  fi
}

install_packages() {
  local missing count
  if [ "${MISA_SKIP_PACKAGES:-0}" = 1 ]; then
    return
  fi
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    fail "this system has no apt; Debian 12 and Ubuntu 24.04 are supported. Elsewhere, install the counterparts of" \
      "tools/packages.txt yourself and run this again with MISA_SKIP_PACKAGES=1."
  fi
  missing=$(missing_packages | xargs)
  [ -n "$missing" ] || return 0
  count=$(wc -w <<<"$missing")
  case $(. /etc/os-release 2>/dev/null && echo "${ID:-}-${VERSION_ID:-}") in
    debian-12 | ubuntu-24.04) ;;
    *) say "this is neither Debian 12 nor Ubuntu 24.04, on which this is tried; going on all the same" ;;
  esac
  if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
    fail "$count packages are missing and neither root nor sudo is at hand. Ask an administrator to run:" \
      "apt-get install $missing"
  fi
  say "installing $count packages (a minute or two): $missing"
  if ! as_root apt-get -q -o DPkg::Lock::Timeout=300 update >"$log" 2>&1 ||
    ! as_root apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $missing >>"$log" 2>&1; then
    tail -n 12 "$log" >&2
    fail "apt-get could not install the packages named above; its output is in $log. Check the network and the" \
      "package sources in /etc/apt (Debian 12 and Ubuntu 24.04 have all of them), then run this again."
  fi
}

# A Python of 3.10 or newer with venv and headers: the distribution's first, because its headers were just installed.
usable_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" - 2>/dev/null <<'PYTHON'; then
import ensurepip, os, sys, sysconfig, venv
ok = sys.version_info >= (3, 10) and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
sys.exit(not ok)
PYTHON
      echo "$python"
      return
    fi
  done
}

install_python() {
  local python digest stamp=.venv/.requirements
  local files=(tools/requirements.txt tools/requirements-ecosystem.txt)
  digest=$(cat "${files[@]}" | sha256sum | cut -d' ' -f1)
  if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && [ -x .venv/bin/python ]; then
    return
  fi
  if [ ! -x .venv/bin/python ]; then
    python=$(usable_python)
    [ -n "$python" ] || fail "no Python of 3.10 or newer with venv and headers was found; install python3-venv and python3-dev."
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  if ! .venv/bin/python -m pip install --quiet --dry-run --no-index "${files[@]/#/-r}" >/dev/null 2>&1; then
    say "installing Python packages into .venv (about 5 GB on disk, torch is most of it; one to five minutes): $(
      sed '/^#/d' "${files[@]}" | xargs)"
    if ! .venv/bin/python -m pip install --progress-bar off --disable-pip-version-check "${files[@]/#/-r}" >"$log" 2>&1; then
      tail -n 12 "$log" >&2
      fail "pip could not install ${files[*]}; its output is in $log. Check the network, the package index" \
        "pip is set to use, and the free space on this disk (5 GB), then run this again."
    fi
  fi
  echo "$digest" >"$stamp"
}

install_packages
[ "$purpose" = lint ] || install_python
